"""GradientAccumulationScheduler: another number of micro-batches per optimizer step from given epochs on."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from drivetrain.callback import Callback
from drivetrain.declaration import refuse
from drivetrain.errors import ConfigurationError, WrongKindError

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class GradientAccumulationScheduler(Callback):
    """Arguments and meaning are Lightning's.

    Args:
        scheduling: ``{epoch: factor}`` with epochs from 0; from each epoch on so many micro-batches share an optimizer
            step. Before the first it is 1.

    Raises:
        ConfigurationError: epochs or factors that are none.
    """

    def __init__(self, scheduling: dict[int, int]) -> None:
        if not scheduling:
            raise WrongKindError("GradientAccumulationScheduler(scheduling={}): give {epoch: factor}.")
        if any(_below(epoch, 0) for epoch in scheduling):
            raise ConfigurationError(
                f"GradientAccumulationScheduler(scheduling={scheduling!r}): give {{epoch: factor}} with epochs from 0."
            )
        if any(_below(factor, 1) for factor in scheduling.values()):
            raise ConfigurationError(
                f"GradientAccumulationScheduler(scheduling={scheduling!r}): give factors that are whole numbers of at"
                " least 1."
            )
        self.scheduling = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)
        self._set = 1  # the factor that the Trainer has of this callback

    def going_to_accumulate_grad_batches(self) -> bool:
        """Whether any epoch accumulates."""
        return any(factor > 1 for factor in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """The factor in ``epoch``."""
        return self.scheduling[max(start for start in self.epochs if start <= epoch)]

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise ConfigurationError(
                f"GradientAccumulationScheduler cannot accumulate for {type(pl_module).__name__}, which optimises by"
                " hand: step its optimizers every so many batches in training_step, or leave the callback out."
            )
        if trainer.accumulate_grad_batches not in (1, self._set):
            raise ConfigurationError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} goes against the"
                " GradientAccumulationScheduler in callbacks: drop one."
            )
        trainer.accumulate_grad_batches = max(self.scheduling.values())
        refuse(trainer.plan(stages=(stage,)), trainer.declaration)
        trainer.accumulate_grad_batches = self._set = 1

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        steps = [name for name in ("optimizer_step", "optimizer_zero_grad") if trainer.hooks.module_has(name)]
        if steps and self.going_to_accumulate_grad_batches() and trainer.is_global_zero:
            warnings.warn(
                f"{' and '.join(steps)} of {type(pl_module).__name__} are called once for each optimizer step, not for"
                " each batch, where gradients are accumulated.",
                stacklevel=2,
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        trainer.accumulate_grad_batches = self._set = self.get_accumulate_grad_batches(trainer.current_epoch)


def _below(number: object, least: int) -> bool:
    return isinstance(number, bool) or not isinstance(number, int) or number < least
