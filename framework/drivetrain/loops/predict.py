"""Prediction: every sample once on one rank, the results in the order of the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.comm import phase
from drivetrain.data_hooks import move
from drivetrain.loops.evaluation_data import choose_epoch, open_first, together, without_gradients
from drivetrain.loops.evaluation_names import EvaluationNames, Progress
from drivetrain.loops.step_arguments import check_loader_index, step_arguments
from drivetrain.sharding import BatchSource, MicroBatch

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


class PredictLoop(EvaluationNames):
    """Runs ``predict_step`` over the loaders and brings the predictions together in the order of the data.

    Attributes:
        current_batch_indices: numbers of this rank's samples of the batch at hand in the data set; None where they have
            none.
        epoch_batch_indices: the same of all batches so far, a list for each loader.
        keeps: whether the predictions of the batch at hand count here; another rank has the same otherwise.
        batch_progress: counts of batches of all loaders: ``current`` in this prediction, ``total`` with earlier ones.
    """

    reads = "predict"

    def __init__(
        self,
        trainer: Trainer,
        sources: list[BatchSource],
        collect: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self.trainer, self.sources, self._collect = trainer, sources, collect
        self.batch_progress = progress or Progress()
        self.current_batch_indices: list[Any] | None = None
        self.epoch_batch_indices: list[list[Any]] = [[] for _ in sources]
        self.keeps = True
        self._found: list[list[tuple[int, int, Any]]] = [[] for _ in sources]

    @property
    def predictions(self) -> list[Any]:
        """This rank's predictions so far: a list over batches, within one over loaders where there are several."""
        listed = [[output for _, _, output in loader] for loader in self._found]
        return listed[0] if len(listed) == 1 else listed

    def run(self) -> list[list[tuple[int, int, Any]]]:
        """Per loader, this rank's ``(batch, rank, prediction)``."""
        trainer = self.trainer
        hooks, module = trainer.hooks, trainer.lightning_module
        trainer.remember_modes()
        self.batch_progress.begin()
        arguments = step_arguments(module.predict_step, len(self.sources) > 1)
        with phase.during(phase.EVALUATION), trainer.consensus(), without_gradients(trainer):
            check_loader_index(module, "predict", len(self.sources) > 1)
            choose_epoch(trainer, self.sources, False)
            open_first(self.sources)
            hooks.of_module("on_predict_model_eval")
            hooks("on_predict_start")
            hooks("on_predict_epoch_start")
            for source, found, chosen in zip(self.sources, self._found, self.epoch_batch_indices, strict=True):
                self._loader(source, arguments, found, chosen)
            trainer.metrics.batch = None
            hooks("on_predict_epoch_end")
            hooks("on_predict_end")
            hooks.of_module("on_predict_model_train")
        return self._found

    def _loader(
        self,
        source: BatchSource,
        arguments: Callable[..., Any],
        found: list[tuple[int, int, Any]],
        chosen: list[Any],
    ) -> None:
        trainer = self.trainer
        hooks, module, strategy = trainer.hooks, trainer.lightning_module, trainer.strategy
        loader = (source.index,) if len(self.sources) > 1 else ()
        for micro in together(source, trainer):
            batch = trainer.to_device(micro)
            self.current_batch_indices, trainer.metrics.batch = micro.indices, micro
            self.keeps = strategy.predicts and (micro.copies == 1 or strategy.data.rank == 0)
            last = self.batch_progress.current.ready + 1 == sum(one.length for one in self.sources)
            self.batch_progress.take(last)
            hooks("on_predict_batch_start", batch, micro.index, *loader)
            self.batch_progress.come_to("started")

            def call(batch: Any, micro: MicroBatch = micro) -> Any:
                return module.predict_step(*arguments(micro, batch))

            output = strategy.evaluation_step(call, batch)
            self.batch_progress.come_to("processed")
            hooks("on_predict_batch_end", output, batch, micro.index, *loader)
            self.batch_progress.come_to("completed")
            if self.keeps and self._collect:
                if strategy.device.type != "cpu":  # where all of them need not fit
                    output = move(output, torch.device("cpu"))
                found.append((micro.index, strategy.data.rank, output))
                if micro.indices is not None:
                    chosen.append(micro.indices)
