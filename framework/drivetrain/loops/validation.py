"""Validation within a fit: when it is due, and what surrounds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from drivetrain import stage_data
from drivetrain.checkpoint import rng
from drivetrain.loops.evaluate import Abandoned, EvaluateLoop

if TYPE_CHECKING:
    from drivetrain.loops.fit import FitLoop


class Validations:
    """The validations of a fit.

    Attributes:
        done: whether the validation that is due after the micro-batch at hand has run.
        read_in: the epoch in which the loaders were asked for last.
        newest: batches since validation was thought of last: one, or a window's.
        validated_at: batches of the epoch at hand when the last validation of it ran; 0 before any.
    """

    def __init__(self, fit: FitLoop) -> None:
        self.fit, self.trainer = fit, fit.trainer
        self.done = False
        self.newest = 1
        self.validated_at = 0
        self._timed_at = 0.0  # seconds of training at the last one that time called for
        self.read_in = fit.epoch

    @property
    def newest_names(self) -> set[str]:
        """What the epoch's last validation logged."""
        loop = self.trainer.validation
        return loop.metrics.names() if loop is not None and self.validated_at else set()

    # -- when ---------------------------------------------------------------------------------------------------
    def in_epoch(self) -> bool:
        """Whether this epoch is one with validation."""
        return self.trainer.has_validation and self._falls_in(self.fit.epoch)

    def _falls_in(self, epoch: int) -> bool:
        every = self.trainer.check_val_every_n_epoch
        return every is None or (epoch + 1) % every == 0

    def _due(self, last: bool) -> bool:
        fit, trainer = self.fit, self.trainer
        every = trainer.check_val_every_n_epoch
        if not self.in_epoch():
            return False
        if fit.limits.stop():  # what training ends with is validated
            return True
        if trainer.val_check_seconds is not None:
            return self._time_over(trainer.val_check_seconds)
        due, interval = trainer.val_check_batch, trainer.val_check_interval
        if due == float("inf") or (isinstance(interval, float) and interval == 1.0):
            return last
        done = fit.batches_seen if every is None else fit.batch
        return done // int(due) > (done - self.newest) // int(due)  # one due within a window comes after it

    def _time_over(self, seconds: float) -> bool:
        """Whether so much training time passed since the last validation, of the rank that trained longest as the ranks
        know it: they look at boundaries only, and one alone at its clock."""
        boundary = self.fit.boundary
        now = boundary.seconds() if boundary.alone else boundary.agreed_seconds
        if now - self._timed_at < seconds:
            return False
        self._timed_at = now
        return True

    # -- what ---------------------------------------------------------------------------------------------------
    def run_if_due(self, last: bool) -> None:
        """Validate if that is due after the batch at hand and was not done yet; ``last``: of the epoch."""
        if not self.done and self._due(last):
            self._run()

    def _run(self) -> None:
        fit, trainer = self.fit, self.trainer
        self.validated_at = fit.batch
        self.done = True  # before its end hooks run: a checkpoint made in them must not validate again
        trainer.published.keep()  # of the training step; those of the same name that are logged now stay over them
        trainer.validating = True
        # Gradients of an incomplete window are kept; a module that optimises by hand may be accumulating.
        if fit.between_steps and (fit.optimization.stepped or fit.module.automatic_optimization):
            fit.hooks.of_module("on_validation_model_zero_grad")
        random_state = rng.capture()
        loop: EvaluateLoop | None = None
        drawn_from: list[Any] = []
        try:
            loop = self._loop()
            if loop is not None:
                drawn_from = loop.drawn_from()
                loop.run()
            trainer.training = True
            torch.set_grad_enabled(True)
        except Abandoned as stop:
            self.done = False
            rng.restore(random_state)  # the checkpoint made now is of the moment before it
            assert loop is not None
            loop.draw_again_from(drawn_from)
            fit.obey(stop.signal)
        fit.boundary.agree_to_stop(fit.metrics)
        fit.obey(fit.boundary.signal)

    def _loop(self) -> EvaluateLoop | None:
        """What validates, its loaders asked for again where it is time; None where there turns out to be no data."""
        trainer = self.trainer
        asked_before = trainer.validation is not None and bool(trainer.validation.sources)
        loop = stage_data.validation(trainer)
        every = trainer.reload_dataloaders_every_n_epochs
        if not asked_before:
            if not self.fit.restored or not every or self._outdated(every):
                self.read_in = trainer.current_epoch
        elif loop is not None and every and self._outdated(every):
            loop.use(stage_data.ask_again(trainer, "val"))
            self.read_in = trainer.current_epoch
        return loop

    def _outdated(self, every: int) -> bool:
        """Whether loaders were asked for ``every`` epochs ago, or by a check before an epoch without validation."""
        return self.trainer.current_epoch - self.read_in >= every or not self._falls_in(self.read_in)
