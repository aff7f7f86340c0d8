"""LearningRateFinder: a range test of the learning rate before training, which then begins with what it suggests."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError, EndStage, MissingPartError, nearest
from drivetrain_plugins.tuner import attributes
from drivetrain_plugins.tuner.learning_rate_range import LearningRateRange, range_test

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer

log = logging.getLogger(__name__)
MODES = ("exponential", "linear")


class LearningRateFinder(Callback):
    """Arguments and figures are Lightning's; the loss is that of one process, by which all workers decide alike.

    Override ``on_fit_start`` and call :meth:`lr_find` elsewhere (``on_train_epoch_start``) to search at other times.

    Args:
        min_lr, max_lr: the first rate and the last, the larger one of which may come first.
        num_training_steps: steps of the test.
        mode: ``"exponential"`` or ``"linear"``: how the rate grows.
        early_stop_threshold: end the test where the smoothed loss is so many times its best; None: never.
        update_attr: set the suggested rate in the module, and in its optimizer.
        attr_name: attribute of the module or its hparams to set; default: ``lr`` or ``learning_rate``.

    Attributes:
        optimal_lr: what was found, with ``suggestion()``, ``plot()`` and ``results``; None before.
    """

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        if mode.lower() not in MODES:
            raise ConfigurationError(f"LearningRateFinder(mode={mode!r}): {nearest(mode, MODES)}")
        if not (min_lr > 0 and max_lr > 0):
            raise ConfigurationError(f"LearningRateFinder(min_lr={min_lr}, max_lr={max_lr}): give rates above 0.")
        self._min_lr, self._max_lr = min_lr, max_lr
        self._num_training_steps = num_training_steps
        self._mode = mode.lower()
        self._early_stop_threshold = early_stop_threshold
        self._update_attr = update_attr
        self._attr_name = attr_name
        self._early_exit = False  # of the Tuner, which wants nothing else of the fit
        self.optimal_lr: LearningRateRange | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self.lr_find(trainer, pl_module)

    def lr_find(self, trainer: Trainer, pl_module: TrainModule) -> None:
        """Search now; every rank comes here at the same moment of a run.

        Raises:
            ConfigurationError: the attribute to set is not there, or there are several optimizers.
        """
        if trainer.fast_dev_run:
            warnings.warn("fast_dev_run: the learning rate is not searched for.", stacklevel=2)
        else:
            name = self.attribute(trainer) if self._update_attr else ""
            self.optimal_lr = range_test(
                trainer,
                self._min_lr,
                self._max_lr,
                self._num_training_steps,
                self._mode,
                self._early_stop_threshold,
            )
            rate = self.optimal_lr.suggestion()
            if rate is None and trainer.is_global_zero:
                warnings.warn(
                    f"the range test has only {len(self.optimal_lr.results['loss'])} losses, too few to suggest a"
                    " learning rate: take more steps or more data.",
                    stacklevel=2,
                )
            if name and rate is not None:
                self._set(trainer, name, rate)
        if self._early_exit:
            raise EndStage

    def attribute(self, trainer: Trainer) -> str:
        """Name of the attribute that holds the rate."""
        names = (self._attr_name,) if self._attr_name else ("lr", "learning_rate")
        for name in names:
            if attributes.places(trainer, name):
                return name
        raise MissingPartError(
            f"{type(trainer.lightning_module).__name__} has no {' or '.join(names)}, as an attribute or among its"
            " hparams, to set the learning rate in: name one with attr_name, or set update_attr=False."
        )

    def _set(self, trainer: Trainer, name: str, rate: float) -> None:
        attributes.put(trainer, name, rate)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        if trainer.is_global_zero:
            log.info("learning rate set to %s", rate)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.optimal_lr is None else self.optimal_lr.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimal_lr = LearningRateRange.from_state(state_dict) if state_dict else None
