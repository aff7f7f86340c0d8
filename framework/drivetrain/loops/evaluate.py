"""Validation, test and prediction: every sample once on one rank; no rank waits for another until the end."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.comm import phase
from drivetrain.launch import signals
from drivetrain.metrics import Exchange, Metrics
from drivetrain.sharding import BatchSource, MicroBatch

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


class Abandoned(Exception):
    """An evaluation was given up on all ranks because one of them was asked to stop by ``signal``."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


def takes(step: Callable[..., Any], name: str, position: int) -> bool:
    """Whether ``step`` has a parameter called ``name``, or any at that position (from 0) or ``*args``."""
    parameters = inspect.signature(step).parameters
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    return name in parameters or variadic or len(positional) > position


def step_arguments(step: Callable[..., Any], several_loaders: bool) -> Callable[[MicroBatch, Any], tuple[Any, ...]]:
    """What to call ``step`` with: the batch, and ``batch_idx`` and ``dataloader_idx`` where its signature has them."""
    index = takes(step, "batch_idx", 1)
    loader = several_loaders and takes(step, "dataloader_idx", 2)

    def arguments(micro: MicroBatch, batch: Any) -> tuple[Any, ...]:
        if not index:
            return (batch,)
        return (batch, micro.index, micro.loader) if loader else (batch, micro.index)

    return arguments


def empty(which: str, source: BatchSource, loaders: int) -> str:
    """What to say of a loader of ``which`` that has no batch; whoever waits for its metrics waits in vain."""
    number = f"number {source.index} " if loaders > 1 else ""
    return f"the {which} data is empty: its loader {number}gives no batch, so nothing comes of it."


class EvaluateLoop:
    """One pass over the loaders of ``stage`` (``"validation"`` or ``"test"``).

    Attributes:
        metrics: what was logged.
        results: one dict of metrics per loader.
    """

    def __init__(self, trainer: Trainer, stage: str, sources: list[BatchSource]) -> None:
        self.trainer, self.stage, self.sources = trainer, stage, sources
        self.metrics: Metrics = trainer.new_metrics()
        self.metrics.several_loaders = len(sources) > 1
        self.results: list[dict[str, float]] = []
        self._passes = 0
        self._told: set[int] = set()

    def run(self, limit: int | None = None) -> list[dict[str, float]]:
        """Evaluate; ``limit`` batches of each loader at most (the sanity check)."""
        trainer, stage = self.trainer, self.stage
        hooks = trainer.hooks
        former, trainer.metrics = trainer.metrics, self.metrics
        self.metrics.reset()
        no_grad = torch.inference_mode if trainer.inference_mode else torch.no_grad
        try:
            trainer.remember_modes()
            hooks.of_module(f"on_{stage}_model_eval")
            with phase.during(phase.EVALUATION), trainer.consensus(), no_grad():
                hooks(f"on_{stage}_start")
                hooks(f"on_{stage}_epoch_start")
                for source in self.sources:
                    source.set_epoch(trainer.current_epoch if stage == "validation" else 0)
                    self._loader(source, limit)
                self.metrics.batch = None
                if signals.pending() is None:
                    hooks(f"on_{stage}_epoch_end")
                self._reduce()
                hooks(f"on_{stage}_end")
            hooks.of_module(f"on_{stage}_model_train")
        finally:
            trainer.metrics = former
        return self.results

    def _loader(self, source: BatchSource, limit: int | None) -> None:
        trainer, stage, metrics = self.trainer, self.stage, self.metrics
        hooks, strategy = trainer.hooks, trainer.strategy
        step = getattr(trainer.lightning_module, f"{stage}_step")
        arguments = step_arguments(step, len(self.sources) > 1)
        loader = (source.index,) if len(self.sources) > 1 else ()
        found = False
        for micro in source:
            found = True
            if limit is not None and micro.index >= limit:
                break
            # Where each rank's forward pass waits for the others', none may leave before the end.
            if signals.pending() is not None and not strategy.data.lockstep:
                break
            batch = trainer.to_device(micro)
            metrics.batch = micro
            hooks(f"on_{stage}_batch_start", batch, micro.index, *loader)

            def call(batch: Any, micro: MicroBatch = micro) -> Any:
                former, hooks.current = hooks.current, f"{stage}_step"
                try:
                    return step(*arguments(micro, batch))
                finally:
                    hooks.current = former

            output = strategy.evaluation_step(call, batch)
            hooks(f"on_{stage}_batch_end", output, batch, micro.index, *loader)
        # Only now is it known of a stream. The first rank has a part of every batch that there is.
        if not found and source.length > 0 and trainer.is_global_zero and source.index not in self._told:
            self._told.add(source.index)
            warnings.warn(empty(stage, source, len(self.sources)), stacklevel=2)

    def _reduce(self) -> None:
        """The epoch's metrics over all ranks, and the values logged by batch, each where it belongs."""
        trainer, metrics = self.trainer, self.metrics
        columns = metrics.epoch_columns()
        for batch, values in metrics.steps_by_batch().items():
            columns |= {f"{batch}\n{name}": column for name, column in values.items()}
        signal = signals.pending()
        exchange = metrics.exchange({} if signal else columns, (float(signal or 0), 0.0, 0.0, 0.0))
        raised = [int(flags[0]) for flags in exchange.flags if flags[0]]
        if raised:
            raise Abandoned(raised[0])
        by_batch: dict[int, Exchange] = {}
        epoch = Exchange({}, exchange.columns, [], [])
        for key, value in exchange.values.items():
            number, cut, name = key.rpartition("\n")
            if not cut:
                epoch.values[name] = value
                continue
            step = by_batch.setdefault(int(number), Exchange({}, {}, [], []))
            step.values[name], step.columns[name] = value, exchange.columns[key]
        if not trainer.sanity_checking:
            self._write_steps(by_batch)
        objects = metrics.torchmetrics(exchange.columns)
        step_done = trainer.global_step - (trainer.stage == "fit")  # within fit: beside the step that came before
        trainer.publish(epoch, step=step_done)
        trainer.publish(objects, step=step_done)
        self.results = self._by_loader(epoch.values | objects.values)

    def _write_steps(self, by_batch: dict[int, Exchange]) -> None:
        longest = 1 + max(by_batch, default=0)
        for batch in sorted(by_batch):
            self.trainer.write_metrics(by_batch[batch], step=self._passes * longest + batch)
        self._passes += 1

    def _by_loader(self, values: dict[str, float]) -> list[dict[str, float]]:
        if len(self.sources) <= 1:
            return [dict(values)]
        results: list[dict[str, float]] = [{} for _ in self.sources]
        for name, value in values.items():
            _, _, index = name.rpartition("/dataloader_idx_")
            for position, result in enumerate(results):
                if not index.isdigit() or int(index) == position:
                    result[name] = value
        return results


class PredictLoop:
    """Runs ``predict_step`` over the loaders and brings the predictions together in the order of the data."""

    def __init__(self, trainer: Trainer, sources: list[BatchSource]) -> None:
        self.trainer, self.sources = trainer, sources

    def run(self) -> list[list[tuple[int, int, Any]]]:
        """Per loader, this rank's ``(batch, rank, prediction)``."""
        trainer = self.trainer
        hooks, module = trainer.hooks, trainer.lightning_module
        no_grad = torch.inference_mode if trainer.inference_mode else torch.no_grad
        trainer.remember_modes()
        hooks.of_module("on_predict_model_eval")
        arguments = step_arguments(module.predict_step, len(self.sources) > 1)
        found: list[list[tuple[int, int, Any]]] = []
        with phase.during(phase.EVALUATION), trainer.consensus(), no_grad():
            hooks("on_predict_start")
            hooks("on_predict_epoch_start")
            for source in self.sources:
                found.append(self._loader(source, arguments))
            hooks("on_predict_epoch_end")
            hooks("on_predict_end")
        hooks.of_module("on_predict_model_train")
        return found

    def _loader(self, source: BatchSource, arguments: Callable[..., Any]) -> list[tuple[int, int, Any]]:
        trainer = self.trainer
        hooks, module, strategy = trainer.hooks, trainer.lightning_module, trainer.strategy
        loader = (source.index,) if len(self.sources) > 1 else ()
        found = []
        for micro in source:
            batch = trainer.to_device(micro)
            hooks("on_predict_batch_start", batch, micro.index, *loader)

            def call(batch: Any, micro: MicroBatch = micro) -> Any:
                return module.predict_step(*arguments(micro, batch))

            output = strategy.evaluation_step(call, batch)
            hooks("on_predict_batch_end", output, batch, micro.index, *loader)
            if strategy.predicts and (micro.copies == 1 or strategy.data.rank == 0):
                found.append((micro.index, strategy.data.rank, output))
        return found
