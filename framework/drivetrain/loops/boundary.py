"""Where ranks agree. Between boundaries no rank waits for another except for gradients.

At a boundary the ranks exchange, in one or two small gathers: the values to be logged, the losses of the steps since
the last boundary, and their wishes to stop (a signal, ``should_stop``, a time limit). Boundaries come every
``log_every_n_steps`` optimizer steps, sooner where steps are slow, so that a wish is heard within about a second.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.errors import TrainingError
from drivetrain.launch import signals
from drivetrain.metrics import Column, Exchange, Metrics

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

_HEARD_WITHIN = 1.0  # seconds in which a wish to stop is heard
_CURVE_LIMIT = 10_000


class Boundary:
    """Keeps the losses between boundaries and carries out the agreement.

    Attributes:
        next_step: optimizer step after which the ranks agree next.
        agreed_seconds: the longest any rank has been training, as agreed at the last boundary.
        logged: the last step at which metrics were written because a log boundary fell on it.
        stop: whether the ranks agreed to stop.
        signal: number of the signal that the ranks agreed to stop for, else None.
    """

    def __init__(self, trainer: Trainer, step: int) -> None:
        self.trainer = trainer
        self.logged = step
        self.next_step = 0
        self.agreed_seconds = 0.0
        self.stop = False
        self.signal: int | None = None
        self.stop_reason: str | None = None
        self._kept: list[tuple[int, Any, float]] = []  # number, loss and weight of each step since the last boundary
        self._since = perf_counter()
        self._begun = perf_counter()
        self._earlier = 0.0
        self._last_step = 0
        self.alone = trainer.strategy.communicator.world_size == 1

    def start(self, step: int, seconds: float = 0.0) -> None:
        """Begin (or go on, with ``seconds`` spent before) at optimizer step ``step``."""
        self._begun = self._since = perf_counter()
        self._earlier = self.agreed_seconds = seconds
        self._last_step = step
        self._plan(step, 0.0)

    def seconds(self) -> float:
        """Seconds that this rank has been training, from the first start on."""
        return self._earlier + perf_counter() - self._begun

    def record(self, step: int, loss: Any, weight: float) -> None:
        """Keep a step's loss: the mean over this rank's micro-batches, of which ``weight`` is the weight."""
        self._kept.append((step, loss, weight))

    def agree(self, metrics: Metrics, columns: dict[str, Column] | None = None) -> Exchange:
        """Exchange with all training ranks; every rank comes here at the same step."""
        trainer = self.trainer
        now = perf_counter()
        step = trainer.batches_stepped
        per_step = (now - self._since) / max(1, step - self._last_step)
        losses = _host([loss for _, loss, _ in self._kept])
        self._report_nonfinite(losses)
        wish = _WISHES.get(trainer.stop_wish or "", 1.0 if trainer.should_stop else 0.0)
        flags = (float(signals.pending() or 0), wish, self._earlier + now - self._begun, per_step)
        series = [(loss * weight, weight) for loss, (_, _, weight) in zip(losses, self._kept, strict=True)]
        trainer.timing.begin_step(step, per_step)
        exchange = metrics.exchange(columns or {}, flags, series)
        self._keep_curve(exchange.series)
        raised = [int(f[0]) for f in exchange.flags if f[0]]
        self.signal = raised[0] if raised else None
        wishes = [f[1] for f in exchange.flags if f[1]]
        if wishes:
            trainer.should_stop = self.stop = True
            self.stop_reason = next((name for name, code in _WISHES.items() if code == max(wishes)), None)
        self.agreed_seconds = max(f[2] for f in exchange.flags)
        self._kept.clear()
        self._since, self._last_step = perf_counter(), step
        self._plan(step, max(f[3] for f in exchange.flags))
        return exchange

    def log_due(self) -> bool:
        """Whether the metrics of this step are to be written."""
        trainer, step = self.trainer, self.trainer.batches_stepped
        stopping = self.alone and trainer.meanings.moments == "batch" and trainer.should_stop
        stopping = stopping and trainer.log_every_n_steps > 0
        return step != self.logged and (stopping or trainer.log_falls_on(step))

    def keep_log_step(self) -> None:
        """Have metrics written after this step if a log boundary falls on it, whatever else the ranks agreed for."""
        if self.log_due():
            self.next_step = self.trainer.batches_stepped

    def agree_to_stop(self, metrics: Metrics) -> None:
        """Agree after callbacks that may have asked to stop; nothing to do for a lone rank without a signal."""
        if not self.alone or signals.pending() is not None:
            self.agree(metrics)

    def wish_pending(self) -> bool:
        """Whether this lone rank should look at its wishes now; several ranks look at boundaries only."""
        return self.alone and (self.trainer.should_stop or signals.pending() is not None)

    def _plan(self, step: int, per_step: float) -> None:
        every = self.trainer.log_every_n_steps or _UNLOGGED
        following = (step // every + 1) * every
        if per_step > 0 and not self.alone:
            following = min(following, step + max(1, int(_HEARD_WITHIN / per_step)))
        self.next_step = following

    def _report_nonfinite(self, losses: list[float]) -> None:
        """The first loss since the last boundary that is not finite; skipped steps were reported when skipped."""
        trainer = self.trainer
        if trainer.nonfinite == "skip" or (trainer.nonfinite == "raise" and trainer.fit_loop.check_each_loss):
            return
        for (step, _, _), loss in zip(self._kept, losses, strict=True):
            if not math.isfinite(loss):
                error = nonfinite(loss, step, trainer.global_rank)
                if trainer.nonfinite == "raise":
                    raise error
                warnings.warn(str(error), stacklevel=2)
                return

    def _keep_curve(self, series: list[Sequence[Sequence[float]]]) -> None:
        curve = self.trainer.loss_curve
        if len(series) == 1:
            curve += [(step, t / w) for (step, _, _), (t, w) in zip(self._kept, series[0], strict=True) if w > 0]
            series = []
        for number, (step, _, _) in enumerate(self._kept if series else ()):
            total = sum(rank[number][0] for rank in series)
            weight = sum(rank[number][1] for rank in series)
            if weight > 0:
                curve.append((step, total / weight))
        if len(curve) > 2 * _CURVE_LIMIT:  # thin to every other point; the last stays
            del curve[-2::-2]


_UNLOGGED = 50  # steps between two boundaries where nothing is logged: ranks agree on their wishes all the same
_WISHES = {"max_time": 2.0}


def nonfinite(loss: float, step: int, rank: int) -> TrainingError:
    return TrainingError(
        f"the loss is {loss} at step {step} on rank {rank}: lower the learning rate, clip gradients"
        " (gradient_clip_val), or set nonfinite=skip to drop such steps."
    )


def _host(values: list[Any]) -> list[float]:
    """The kept losses as numbers, with one device transfer."""
    if not values:
        return []
    if all(isinstance(v, torch.Tensor) and v.ndim == 0 and v.dtype == values[0].dtype for v in values):
        return torch.stack(values).double().tolist()
    return [float(v) for v in values]
