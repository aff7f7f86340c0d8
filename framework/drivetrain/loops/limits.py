"""When training is over: its limits of epochs and steps, and wishes to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.loops.fit import FitLoop


class Limits:
    """The Trainer's limits, against where its loop stands."""

    def __init__(self, fit: FitLoop) -> None:
        self.fit, self.trainer = fit, fit.trainer

    def over(self) -> bool:
        """Whether no further epoch begins."""
        fit, trainer = self.fit, self.trainer
        if fit.data.known_empty or self._steps_made():
            return True
        if trainer.max_epochs != -1 and fit.epoch >= trainer.max_epochs:
            return True
        return fit.cut or self.stop()

    def over_in_epoch(self) -> bool:
        """Whether no further window of the epoch begins."""
        trainer, boundary = self.trainer, self.fit.boundary
        if not (trainer.should_stop if boundary.alone else boundary.stop):  # as at nearly every step
            return trainer.max_steps != -1 and self._steps_made()
        return self._steps_made() or self.stop()

    def stop(self) -> bool:
        """Whether to stop now: wished and agreed, and not before ``min_epochs`` and ``min_steps``."""
        fit, trainer, boundary = self.fit, self.trainer, self.fit.boundary
        if not (trainer.should_stop if boundary.alone else boundary.stop):
            return False
        return fit.epoch >= (trainer.min_epochs or 0) and fit.counted_steps >= (trainer.min_steps or 0)

    def unfinished(self) -> bool:
        """Whether a run was resumed within an epoch, of which at least the end is to be done, also at the limits."""
        fit, trainer = self.fit, self.trainer
        return (
            fit.resumed
            and (trainer.max_epochs == -1 or fit.epoch < trainer.max_epochs)
            and (trainer.max_steps == -1 or fit.counted_steps <= trainer.max_steps)
        )

    def _steps_made(self) -> bool:
        return self.trainer.max_steps != -1 and self.fit.counted_steps >= self.trainer.max_steps
