"""PerformanceMonitor: where the time of a training step goes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback
from drivetrain_plugins.callbacks.boundaries import LogBoundaries, write

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class PerformanceMonitor(Callback):
    """Log at log boundaries, of the first worker, mean seconds per optimizer step since the last one:

    =================================  ============================================================================
    ``perf/step``                      wall time, everything included
    ``perf/data``                      waiting for the loader
    ``perf/forward``, ``perf/backward``, ``perf/optimizer``  as the host sees them; backward includes what follows
    ``perf/communication_exposed``     the part of backward that only waited for gradients, mean since training
                                       began; left out where the strategy's engine does not tell
    ``perf/communication``             agreeing at log boundaries
    ``perf/checkpoint``                saving
    ``perf/other``                     the rest: hooks, validation, logging
    =================================  ============================================================================

    The parts are the Trainer's own clock, the one that fills ``seconds`` in ``run.json``: of short steps one in some is
    timed and stands for all. Nothing is exchanged and no device is waited for.
    """

    rank_zero_only = True

    def __init__(self) -> None:
        self._boundaries = LogBoundaries()
        self._before: dict[str, float] = {}
        self._since = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._boundaries.start(trainer)
        self._before, self._since = dict(trainer.timing.seconds), time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps = self._boundaries.steps(trainer)
        if steps:
            self._log(trainer, steps)

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        steps = self._boundaries.rest(trainer)
        if steps:
            self._log(trainer, steps)

    def _log(self, trainer: Trainer, steps: int) -> None:
        now, seconds = time.perf_counter(), dict(trainer.timing.seconds)
        values = {f"perf/{part}": (spent - self._before[part]) / steps for part, spent in seconds.items()}
        whole = (now - self._since) / steps
        values["perf/other"] = max(0.0, whole - sum(values.values()))
        values["perf/step"] = whole
        exposed = trainer.strategy.exposed_communication()
        if exposed is not None:
            values["perf/communication_exposed"] = exposed
        self._before, self._since = seconds, now
        write(trainer, values)
