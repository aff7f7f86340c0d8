"""Puts a profiler around what a stage does. Without one none of this is there: no step is any slower.

Methods are shadowed on the objects of this run, and given back when the stage ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from drivetrain.data_hooks import DataHooks
from drivetrain.hooks import Hooks
from drivetrain.module import TrainModule

if TYPE_CHECKING:
    from drivetrain.loops.fit import FitLoop
    from drivetrain.sharding import BatchSource, MicroBatch
    from drivetrain.trainer import Trainer

# hooks that are actions where a project has its own
_OF_DATA = (
    "prepare_data",
    "setup",
    "teardown",
    *(f"{name}_dataloader" for name in ("train", "val", "test", "predict")),
)
_NEXT = {
    "train": "[_TrainingEpochLoop].train_dataloader_next",
    "val": "[_EvaluationLoop].val_next",
    "test": "[_EvaluationLoop].test_next",
    "predict": "[_PredictionLoop].predict_next",
}


class ProfiledHooks(Hooks):
    """Hooks of which each one is an action: ``[Callback]KEY.NAME``, ``[LightningModule]CLASS.NAME``."""

    def _resolve(self, name: str) -> tuple[Callable[..., Any], ...]:
        if name not in self._functions:
            found = super()._resolve(name)
            self._functions[name] = tuple(self._measured(function, name) for function in found)
        return self._functions[name]

    def _measured(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        callback = getattr(function.func, "__self__", None) if isinstance(function, functools.partial) else None
        return _measured(self.trainer, function, self._label(callback, name))

    def _label(self, callback: Any, name: str) -> str:
        if callback is None:
            return f"[LightningModule]{type(self.module).__name__}.{name}"
        return f"[Callback]{callback.state_key}.{name}"

    def of_module(self, name: str, *args: Any) -> Any:
        with self.trainer.profiler.profile(self._label(None, name)):
            return super().of_module(name, *args)

    def of_callbacks(
        self, name: str, *args: Any, monitors: bool | None = None, saving: bool | None = None, **named: Any
    ) -> None:
        everyone = self.acting(self.trainer.callbacks)  # a callback may cause a hook of all, as checkpoints do
        try:
            for callback in everyone:
                self.callbacks = [callback]
                with self.trainer.profiler.profile(self._label(callback, name)):
                    super().of_callbacks(name, *args, monitors=monitors, saving=saving, **named)
        finally:
            self.callbacks = everyone


class Instruments:
    """The measured methods of a stage."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._put: list[tuple[Any, str, Any]] = []  # with what the object itself had under that name
        module, strategy = trainer.lightning_module, trainer.strategy
        owner = f"[Strategy]{type(strategy).__name__}"
        for step in ("training_step", "validation_step", "test_step", "predict_step"):
            self.put(module, step, f"{owner}.{step}")
        self.put(strategy, "backward", f"{owner}.backward")
        self.put(strategy, "optimizer_step", f"[LightningModule]{type(module).__name__}.optimizer_step")
        self.put(trainer, "save_checkpoint", "save_checkpoint")
        self.put_own(module, "LightningModule", "configure_optimizers", TrainModule)
        for name in _OF_DATA:
            self.put_own(module, "LightningModule", name, DataHooks)
            if trainer.datamodule is not None:
                self.put_own(trainer.datamodule, "LightningDataModule", name, DataHooks)

    def put_own(self, owner: Any, kind: str, method: str, base: type) -> None:
        """Measure a method that ``owner`` has instead of that of ``base``."""
        if method in vars(owner) or getattr(type(owner), method, None) is not getattr(base, method):
            self.put(owner, method, f"[{kind}]{type(owner).__name__}.{method}")

    def put(self, owner: Any, method: str, action: str) -> None:
        """Measure ``owner.method`` as ``action``, also where a project set it on the object."""
        own = owner.__dict__.get(method)
        if getattr(own, "action", None) != action:
            # not asked of the object itself: a data module whose loaders are asked for makes up for its setup
            function = getattr(type(owner), method).__get__(owner) if own is None else own
            owner.__dict__[method] = _measured(self.trainer, function, action)
            self._put.append((owner, method, own))

    def of_fit(self, fit: FitLoop) -> None:
        self.put(fit, "_epoch", "run_training_epoch")
        self.put(fit, "_window", "run_training_batch")

    def of_source(self, source: BatchSource, which: str) -> None:
        """Measure each wait for a batch of ``source``."""
        read, profiler, action = source.read, self.trainer.profiler, _NEXT[which]

        def measured(start: int = 0) -> Iterator[MicroBatch]:
            batches = read(start)
            while True:
                with profiler.profile(action):
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch

        source.__dict__["read"] = measured

    def remove(self) -> None:
        for owner, method, own in self._put:
            if own is None:
                owner.__dict__.pop(method, None)
            else:
                owner.__dict__[method] = own


@contextmanager
def profiled(trainer: Trainer) -> Iterator[None]:
    """Profile what runs within, one stage, and write the report; nothing where the profiler measures nothing."""
    profiler = trainer.profiler
    if not profiler.measures:
        yield
        return
    rank = trainer.local_rank if trainer.world_size > 1 else None
    profiler._module = trainer.lightning_module
    profiler.setup(trainer.stage or "", rank, trainer.log_dir)
    instruments = trainer.instruments = Instruments(trainer)
    try:
        yield
    finally:
        trainer.instruments = None
        instruments.remove()
        profiler.describe()
        profiler._module = None


def _measured(trainer: Trainer, function: Callable[..., Any], action: str) -> Callable[..., Any]:
    @functools.wraps(getattr(function, "func", function))
    def measured(*args: Any, **kwargs: Any) -> Any:
        with trainer.profiler.profile(action):
            return function(*args, **kwargs)

    measured.action = action  # type: ignore[attr-defined]
    return measured
