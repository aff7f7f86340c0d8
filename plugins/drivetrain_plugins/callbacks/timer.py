"""Timer: how long the stages took, and a wish to stop after a given time."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from drivetrain.arguments import in_seconds
from drivetrain.callback import Callback
from drivetrain.dependent_options import Dependent
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer

log = logging.getLogger(__name__)


class Interval(StrEnum):
    """After what a clock is looked at."""

    step = "step"
    epoch = "epoch"


STAGES = ("train", "sanity_check", "validate", "test", "predict")


class Timer(Callback):
    """Names, arguments and meaning are Lightning's.

    A clock is one worker's own, so reaching the duration is only a wish: ``trainer.request_stop("max_time")``. The
    workers agree on it at the next log boundary and stop at the same step; a worker that is alone stops at once.

    Args:
        duration: training time at most, as ``"DD:HH:MM:SS"``, a ``timedelta`` or its keywords; None only measures.
        interval: look at the clock after every ``"step"`` or every ``"epoch"``.
        verbose: report when the time is up.

    Raises:
        ConfigurationError: a duration or an interval that cannot be read.
    """

    dependents = (Dependent("interval", {".duration": "00:01:00:00"}, lambda plan, own: own["duration"] is not None),)

    def __init__(
        self, duration: str | timedelta | dict[str, int] | None = None, interval: str = "step", verbose: bool = True
    ) -> None:
        if interval not in ("step", "epoch"):
            raise ConfigurationError(f"Timer(interval={interval!r}) is none: use 'step' or 'epoch'.")
        self._duration = None if duration is None else in_seconds("Timer: duration", duration, zero=True)
        self._by_step = interval == Interval.step and self._duration is not None
        self._verbose = verbose
        self._started: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._before = 0.0  # seconds trained before this process, from the checkpoint
        self._asked = False

    def start_time(self, stage: str = "train") -> float | None:
        """Monotonic clock at the stage's start, seconds."""
        return self._started.get(_stage(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Monotonic clock at the stage's end, seconds."""
        return self._ended.get(_stage(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Seconds in the stage; training counts what was done before resuming."""
        start, end = self.start_time(stage), self.end_time(stage)
        before = self._before if stage == "train" else 0.0
        if start is None:
            return before
        return (time.monotonic() if end is None else end) - start + before

    def time_remaining(self, stage: str = "train") -> float | None:
        """Seconds left of the duration; None without one."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    def _start(self, stage: str) -> None:
        self._started[stage] = time.monotonic()
        self._ended.pop(stage, None)

    def _end(self, stage: str) -> None:
        self._ended[stage] = time.monotonic()

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._asked = False
        self._check_time_remaining(trainer)  # a resumed run may have used up its time

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._start("train")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._by_step:
            self._check_time_remaining(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._check_time_remaining(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end("train")

    def on_sanity_check_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._start("sanity_check")

    def on_sanity_check_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end("sanity_check")

    def on_validation_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._start("validate")

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end("validate")

    def on_test_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._start("test")

    def on_test_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end("test")

    def on_predict_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._start("predict")

    def on_predict_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end("predict")

    def _check_time_remaining(self, trainer: Trainer) -> None:
        """Wish to stop where the time is up; for subclasses that look at another moment (the name is Lightning's)."""
        if self._duration is None or self._asked or self.time_elapsed() < self._duration:
            return
        self._asked = True
        trainer.request_stop("max_time")
        if self._verbose and trainer.is_global_zero:
            log.info("time is up after %.1f s: training stops", self.time_elapsed())

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = float(state_dict["time_elapsed"]["train"])


def _stage(stage: str) -> str:
    if stage not in STAGES:
        raise ConfigurationError(f"Timer has no stage {stage!r}: use one of {', '.join(STAGES)}.")
    return stage
