"""Which learning-rate schedulers step when: by steps, by epochs, and those that watch a metric."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from drivetrain.errors import ConfigurationError, nearest
from drivetrain.optimizer import SchedulerConfig

if TYPE_CHECKING:
    from drivetrain.loops.fit import FitLoop


class Schedules:
    """The schedulers of a run. A module that optimises by hand steps its own.

    Attributes:
        plateau_due: whether a scheduler still has to read a metric after the step that was made last.
        stepped, stepped_in_epoch: how often schedulers stepped, all together.
    """

    def __init__(self, fit: FitLoop) -> None:
        self.fit, self.trainer, self.module = fit, fit.trainer, fit.module
        self.plateau_due = False
        self.stepped = self.stepped_in_epoch = 0
        self._interval = 0  # what the step made last counts as
        self._watches = False  # whether a scheduler reads a metric after every step
        self._kept: dict[str, torch.Tensor] = {}  # of an epoch that ended before this run was resumed

    def start(self) -> None:
        """The run begins: all schedulers are known."""
        self._watches = any(c.interval == "step" and c.reduce_on_plateau for c in self.trainer.lr_scheduler_configs)

    def keep(self) -> None:
        """Keep what is watched of an epoch of which only the end is left to do: a check before training hides it."""
        watched = {config.monitor for config in self.trainer.lr_scheduler_configs if config.monitor}
        found = {name: self.trainer.monitored(name) for name in watched}
        self._kept = {name: value for name, value in found.items() if value is not None}

    def after_step(self) -> None:
        """Step what counts steps; what watches a metric waits for it."""
        self._interval = self._steps()
        self._step("step", self._interval, plateau=False)
        self.plateau_due = self._watches and bool(self._due("step", self._interval, plateau=True))

    def after_metrics(self) -> None:
        """Step what watches a metric of the last step, which is known by now, where that is ``plateau_due``."""
        self.plateau_due = False
        self._step("step", self._interval, plateau=True)

    def after_epoch(self, *, plateau: bool) -> None:
        """Step what counts epochs: as soon as the batches are done, or (``plateau``) once the metrics are known."""
        self._step("epoch", self.fit.epoch + 1, plateau=plateau)
        if plateau:
            self._kept.clear()

    def _steps(self) -> int:
        """What a schedule's ``frequency`` counts: the steps of the run, or of the epoch."""
        if self.trainer.meanings.frequency == "run":
            return self.fit.global_step
        return -(-(self.fit.batch + 1) // self.trainer.accumulate_grad_batches)

    def _due(self, interval: str, count: int, plateau: bool) -> list[SchedulerConfig]:
        """The schedulers that step after ``count`` intervals."""
        if not self.module.automatic_optimization:
            return []
        return [
            config
            for config in self.trainer.lr_scheduler_configs
            if config.interval == interval and config.reduce_on_plateau is plateau and count % config.frequency == 0
        ]

    def _step(self, interval: str, count: int, *, plateau: bool) -> None:
        for config in self._due(interval, count, plateau):
            self._step_one(config)

    def _step_one(self, config: SchedulerConfig) -> None:
        metric = None
        if config.reduce_on_plateau:
            known = self.trainer.callback_metrics
            metric = self._kept.get(config.monitor or "")
            if metric is None:
                metric = self.trainer.monitored(config.monitor or "")
            if metric is None:
                hint = nearest(config.monitor or "", known)
                what = f"the scheduler watches {config.monitor!r}, which was not logged: {hint}"
                if config.strict:
                    raise ConfigurationError(what)
                warnings.warn(what, stacklevel=2)
                return
        self.module.lr_scheduler_step(config.scheduler, metric)
        self.stepped += 1
        self.stepped_in_epoch += 1
