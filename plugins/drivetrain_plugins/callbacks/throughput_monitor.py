"""ThroughputMonitor: samples and batches per second of training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.callback import Callback
from drivetrain_plugins.callbacks.throughput import Throughput

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


@dataclass
class _Stage:
    """What a stage has done so far."""

    throughput: Throughput
    began: float = field(default_factory=lambda: time.perf_counter())  # noqa: PLW0108  (looked up when called)
    batches: int = 0
    samples: int = 0
    lengths: int | None = None
    run: str | None = "fit"  # the Trainer's stage that it is of
    epoch: int = 0  # in which it began
    steps: int = 0  # its batches
    earlier: int = 0  # batches in earlier runs of it, whose steps are not logged again


class ThroughputMonitor(Callback):
    """Log ``samples_per_second`` (global samples) and ``batches_per_second`` (global batches) at log boundaries.

    Nothing waits for the device: between two log boundaries, where the Trainer reads its metrics and so waits anyway,
    the mean rate is right. Left out are the first batch (lazy initialisation,
    compilation) and what lies between epochs and around validation: only from a batch's start on does the clock run.

    With ``batch_size_fn`` it logs, instead, what Lightning's does, for every stage: totals and, over a window of
    batches, ``train/device/samples_per_sec`` and so on (see :class:`Throughput`); ``pl_module.flops_per_batch`` gives
    operations per second too. The device is not waited for in this case either.

    Args:
        batch_size_fn: samples of a batch.
        length_fn: items (tokens) in a batch.
        kwargs: for :class:`Throughput`: ``window_size``, ``separator``, ``available_flops``.

    Attributes:
        samples_per_second: mean over the run so far, 0.0 before the second batch.
    """

    rank_zero_only = True

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.batch_size_fn, self.length_fn, self.kwargs = batch_size_fn, length_fn, kwargs
        self._stages: dict[str, _Stage] = {}
        self._reset(0)

    def _reset(self, step: int) -> None:
        self._samples = self._batches = 0
        self._seconds = 0.0
        self._total_samples, self._total_seconds = 0, 0.0
        self._since: float | None = None  # clock of the last start; None: not running
        self._warm = False
        self._step = self._logged_step = step

    @property
    def samples_per_second(self) -> float:
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        seconds = self._total_seconds + self._seconds + running
        return (self._total_samples + self._samples) / seconds if seconds > 0 else 0.0

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._reset(trainer.global_step)
        self._begin(trainer, "train")

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int) -> None:
        if self._since is None and self._warm:
            self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._count(trainer, pl_module, "train", batch, trainer.batches_stepped - 1, trainer.between_steps)
        step = trainer.global_step
        if not self._warm:
            self._warm, self._since, self._step = True, time.perf_counter(), step
            return
        self._batches += 1
        if step == self._step:  # inside an accumulation window
            return
        self._step = step
        self._samples += trainer.last_batch_size
        if trainer.log_falls_on(step) and step != self._logged_step:
            self._logged_step = step
            self._log(trainer, step)

    def _log(self, trainer: Trainer, step: int) -> None:
        self._pause()
        if self._seconds > 0 and self.batch_size_fn is None:
            rates = {
                "samples_per_second": self._samples / self._seconds,
                "batches_per_second": self._batches / self._seconds,
            }
            for logger in trainer.loggers:
                logger.log_metrics(metrics=rates, step=step - 1)  # like the metrics of that step
        self._total_samples += self._samples
        self._total_seconds += self._seconds
        self._samples = self._batches = 0
        self._seconds = 0.0
        self._since = time.perf_counter()

    def _pause(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def on_validation_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._pause()
        self._begin(trainer, "validate")

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if "train" in self._stages and "validate" in self._stages:
            self._stages["train"].began += time.perf_counter() - self._stages["validate"].began  # it stood still

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.sanity_checking:
            self._count(trainer, pl_module, "validate", batch, None)

    def on_test_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._begin(trainer, "test")

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._count(trainer, pl_module, "test", batch, None)

    def on_predict_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._begin(trainer, "predict")

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._count(trainer, pl_module, "predict", batch, None)

    # -- with batch_size_fn -------------------------------------------------------------------------------------
    def _begin(self, trainer: Trainer, stage: str) -> None:
        if self.batch_size_fn is not None and not trainer.sanity_checking:
            throughput = Throughput(world_size=trainer.world_size, **self.kwargs)
            known = _Stage(throughput, run=trainer.stage, epoch=trainer.current_epoch)
            before = self._stages.get(stage)
            if before is not None and trainer.stage != "fit":  # evaluations of one Trainer are counted on
                known.batches, known.samples, known.lengths = before.batches, before.samples, before.lengths
            same_epoch = before is not None and (trainer.stage != "fit" or before.epoch == known.epoch)
            if before is not None and before.run == trainer.stage and same_epoch:
                known.earlier = before.earlier + before.steps
            self._stages[stage] = known

    def _count(
        self, trainer: Trainer, pl_module: TrainModule, stage: str, batch: Any, step: int | None, whole: bool = True
    ) -> None:
        """Count a batch, and log where a log boundary falls on it; ``step`` None: the batches of the stage so far."""
        if self.batch_size_fn is None:
            return
        known = self._stages[stage]
        known.batches += 1
        known.steps += 1
        known.samples += self.batch_size_fn(batch)
        if self.length_fn is not None:
            known.lengths = (known.lengths or 0) + self.length_fn(batch)
        known.throughput.update(
            time=time.perf_counter() - known.began,
            batches=known.batches,
            samples=known.samples,
            lengths=known.lengths,
            flops=getattr(pl_module, "flops_per_batch", None),
        )
        if whole and trainer.log_falls_on(known.steps if step is None else trainer.batches_stepped):
            join = known.throughput.separator
            found = {f"{stage}{join}{name}": value for name, value in known.throughput.compute().items()}
            if trainer.loggers:
                trainer.logged_metrics.update({name: torch.tensor(float(value)) for name, value in found.items()})
            beside = {} if step is None else {"epoch": trainer.current_epoch}
            for logger in trainer.loggers:
                logger.log_metrics(metrics=found | beside, step=known.earlier + known.steps if step is None else step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._pause()

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._pause()
