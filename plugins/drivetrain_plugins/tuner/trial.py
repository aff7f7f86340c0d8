"""Trial: some training steps within a run that leave no trace in it: weights, counters, metrics, random numbers."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from drivetrain import stage_data
from drivetrain.callback import Callback
from drivetrain.checkpoint import rng
from drivetrain.hooks import Hooks
from drivetrain.logger import SilentLogger
from drivetrain.loops.evaluate import EvaluateLoop
from drivetrain.loops.fit import FitLoop
from drivetrain.published import PublishedMetrics
from drivetrain.sharding import BatchSource
from drivetrain.timing import Timing

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

_KEPT = (
    "loop", "hooks", "metrics", "published", "loggers", "callbacks", "max_steps",
    "min_steps", "min_epochs", "log_every_n_steps", "validation", "timing", "loss_curve", "should_stop",
    "stop_wish", "lr_scheduler_configs", "train_source", "val_check_batch",
)  # fmt: skip


class Trial:
    """A context within which :meth:`train` may be called, from a hook of a run that has its optimizers.

    The module's hooks are called as in training; callbacks are those given here, and a logger keeps nothing. What the
    run was is put back on leaving, also after an error.

    Args:
        trainer: of the run.
        callbacks: of the trial.
        validates: whether validation comes when it comes in training. It may draw random numbers, or a loader for it,
            so that the order of the next epoch depends on it.
        keeps_random: whether random numbers, too, are afterwards what they were.
    """

    def __init__(
        self, trainer: Trainer, callbacks: list[Callback], validates: bool = False, keeps_random: bool = True
    ) -> None:
        self.trainer, self.callbacks = trainer, callbacks
        self.validates, self.keeps_random = validates, keeps_random

    def __enter__(self) -> Trial:
        trainer, strategy = self.trainer, self.trainer.strategy
        self._kept = {name: getattr(trainer, name) for name in _KEPT}
        self._counters = trainer.fit_loop.counters()
        source = trainer.train_source
        self._opened = source is not None and source.opened  # the run's data were: what this draws was drawn
        self.optimizers = trainer.fit_loop.optimizers
        with torch.no_grad():
            self._state = deepcopy(strategy.state_dict(self.optimizers))
            self._own = deepcopy(strategy.own_state())
        self._schedules = [deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
        self._random = rng.capture()
        trainer.loggers, trainer.callbacks = [SilentLogger()] if trainer.loggers else [], self.callbacks
        validates = self.validates and stage_data.validates(trainer)
        trainer.validation = EvaluateLoop(trainer, "validation") if validates else None
        trainer.min_epochs = trainer.min_steps = None
        trainer.log_every_n_steps = 1  # the ranks agree after every step
        trainer.published, trainer.timing = PublishedMetrics(trainer), Timing()
        trainer.hooks = Hooks(trainer, trainer.lightning_module, self.callbacks)
        return self

    def source(self) -> BatchSource:
        """The training data, asked for anew."""
        trainer = self.trainer
        assert trainer.request is not None
        return stage_data.sources(trainer, trainer.request, "train")[0]

    def train(self, steps: int, source: BatchSource | None = None) -> FitLoop:
        """Train ``steps`` optimizer steps, fewer where ``max_epochs`` end sooner or a callback asks for a stop; returns
        the loop that did."""
        trainer = self.trainer
        own = source is None
        trainer.train_source = self.source() if source is None else source
        trainer.should_stop, trainer.stop_wish, trainer.loss_curve = False, None, []
        trainer.metrics, trainer.published.by_step = trainer.new_metrics(), None
        loop = trainer.loop = FitLoop(trainer, trainer.train_source, **self._counters)
        loop.use(self.optimizers)
        if own and self._opened:
            loop.opened = True
            if loop.epoch == 0:
                with rng.kept():
                    trainer.train_source.open()
        trainer.max_steps = loop.counted_steps + steps
        loop.run()
        return loop

    def __exit__(self, *failure: Any) -> None:
        trainer, strategy = self.trainer, self.trainer.strategy
        for name, value in self._kept.items():
            setattr(trainer, name, value)
        # After an error other ranks may be gone, with whom some strategies load.
        alone = strategy.support.replicated or strategy.communicator.world_size == 1
        if failure[0] is None or (alone and issubclass(failure[0], Exception)):
            strategy.load_state_dict(self._state, self.optimizers)
            strategy.load_own_state(self._own)
            for config, state in zip(trainer.lr_scheduler_configs, self._schedules, strict=True):
                config.scheduler.load_state_dict(state)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        if self.keeps_random:
            rng.restore(self._random)
