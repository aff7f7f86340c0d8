"""Tuner: the searches for learning rate and batch size, started by hand instead of within a run."""

from __future__ import annotations

from typing import Any

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError, nearest
from drivetrain.trainer import Trainer
from drivetrain_plugins.callbacks.batch_size_finder import BatchSizeFinder
from drivetrain_plugins.callbacks.learning_rate_finder import LearningRateFinder
from drivetrain_plugins.tuner import attributes
from drivetrain_plugins.tuner.learning_rate_range import LearningRateRange

METHODS = ("fit", "validate", "test", "predict")


class Tuner:
    """Arguments and results are Lightning's. What is found is set in the module that was given.

    Args:
        trainer: whose settings and workers are used; afterwards it is as it was.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LearningRateRange | None:
        """Search for a learning rate; see :class:`LearningRateFinder` for the arguments.

        Returns:
            what was found, with ``suggestion()``, ``plot()`` and ``results``.

        Raises:
            ConfigurationError: another method than ``"fit"``, or a LearningRateFinder among the callbacks.
        """
        if method != "fit":
            raise ConfigurationError(f"lr_find(method={method!r}): a learning rate is searched for with method='fit'.")
        finder = LearningRateFinder(
            min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr=update_attr, attr_name=attr_name
        )
        self._check(finder, method, train_dataloaders, val_dataloaders, dataloaders)
        self._run(finder, method, model, (train_dataloaders, val_dataloaders), datamodule)
        found = finder.optimal_lr
        rate = None if found is None else found.suggestion()
        if update_attr and rate is not None:
            attributes.put(self._trainer, finder.attribute(self._trainer), rate)
        return found

    def scale_batch_size(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Search for the largest batch size; see :class:`BatchSizeFinder` for the arguments. Returns it.

        Raises:
            ConfigurationError: an unknown method, loaders of another one, or a BatchSizeFinder among the callbacks.
        """
        finder = BatchSizeFinder(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        self._check(finder, method, train_dataloaders, val_dataloaders, dataloaders)
        loaders = (train_dataloaders, val_dataloaders) if method == "fit" else (dataloaders,)
        self._run(finder, method, model, loaders, datamodule)
        if finder.optimal_batch_size is not None and not self._trainer.fast_dev_run:
            attributes.put(self._trainer, batch_arg_name, finder.optimal_batch_size)
        return finder.optimal_batch_size

    def _check(self, finder: Callback, method: str, train: Any, val: Any, other: Any) -> None:
        if method not in METHODS:
            raise ConfigurationError(f"method={method!r}: {nearest(method, METHODS)}")
        if any(type(callback) is type(finder) for callback in self._trainer.callbacks):
            raise ConfigurationError(
                f"the Trainer has a {type(finder).__name__} among its callbacks already: leave it out to use the Tuner."
            )
        if other is not None if method == "fit" else (train is not None or val is not None):
            right = "train_dataloaders and val_dataloaders" if method == "fit" else "dataloaders"
            raise ConfigurationError(f"with method={method!r} loaders are given as {right}.")

    def _run(self, finder: Any, method: str, model: Any, loaders: tuple[Any, ...], datamodule: Any) -> None:
        """The stage, which the finder ends as soon as it has found."""
        trainer = self._trainer
        finder._early_exit = True
        trainer.callbacks.insert(0, finder)
        try:
            getattr(trainer, method)(model, *loaders, datamodule=datamodule)
        finally:
            if finder in trainer.callbacks:
                trainer.callbacks.remove(finder)
            trainer.use_callbacks([])
