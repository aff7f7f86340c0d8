"""What projects read and set of Lightning's training loops, whether or not the loop of a fit is there yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

    from drivetrain.trainer import Trainer


class LoopNames:
    """The limits of a run, which are the Trainer's, under the names of Lightning's loops."""

    trainer: Trainer

    @property
    def epoch_loop(self) -> Self:
        """Lightning's loop of one epoch, here the same object."""
        return self

    @property
    def max_epochs(self) -> int:
        return self.trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self.trainer.max_epochs = -1 if value is None else value

    @property
    def min_epochs(self) -> int | None:
        return self.trainer.min_epochs

    @min_epochs.setter
    def min_epochs(self, value: int | None) -> None:
        self.trainer.min_epochs = value

    @property
    def max_steps(self) -> int:
        return self.trainer.max_steps

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        self.trainer.max_steps = value

    @property
    def min_steps(self) -> int | None:
        return self.trainer.min_steps

    @min_steps.setter
    def min_steps(self, value: int | None) -> None:
        self.trainer.min_steps = value


class LoopToCome(LoopNames):
    """Stands for the loop of a fit until that is there: before the first fit, and in a fit's first hooks."""

    batch_idx = total_batch_idx = -1

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @property
    def global_step(self) -> int:
        return self.trainer.global_step

    @property
    def _batches_that_stepped(self) -> int:
        return self.trainer.batches_stepped

    def setup_data(self) -> None:
        """Ask for the training loaders now, where a fit has begun and they are not there yet."""
        self.trainer.open_training_data()
