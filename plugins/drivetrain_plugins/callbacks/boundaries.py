"""When a callback that measures should write: after the step on which a log boundary falls, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


class LogBoundaries:
    """Tells log boundaries of the steps of one run, and how many steps lie between two of them."""

    def __init__(self) -> None:
        self._last = 0

    def start(self, trainer: Trainer) -> None:
        """Count from here."""
        self._last = trainer.global_step

    def steps(self, trainer: Trainer) -> int:
        """Steps since the boundary before this one, where the step just made is a boundary; else 0."""
        step = trainer.global_step
        if step == self._last or not trainer.log_falls_on(step):
            return 0
        passed, self._last = step - self._last, step
        return passed

    def rest(self, trainer: Trainer) -> int:
        """Steps since the last boundary, at the end."""
        passed, self._last = trainer.global_step - self._last, trainer.global_step
        return passed


def write(trainer: Trainer, values: dict[str, float]) -> None:
    """Give ``values`` to the loggers, beside the metrics of the step just made."""
    for logger in trainer.loggers:
        logger.log_metrics(values, step=trainer.global_step - 1)
