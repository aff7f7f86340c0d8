"""Where Lightning keeps its module, data module and their parts."""

from __future__ import annotations

from typing import Any

from drivetrain.attribute_dict import AttributeDict as AttributeDict
from drivetrain.data import DataModule as LightningDataModule
from drivetrain.data_hooks import DataHooks as DataHooks
from drivetrain.hyperparameters import HyperparametersMixin as HyperparametersMixin
from drivetrain.lightning import deep_names
from drivetrain.lightning import saving as saving
from drivetrain.lightning.utilities import LRSchedulerTypeTuple as LRSchedulerTypeTuple
from drivetrain.module import TrainModule as LightningModule
from drivetrain.module_hooks import CheckpointHooks as CheckpointHooks
from drivetrain.module_hooks import ModelHooks as ModelHooks
from drivetrain.optimizer import TrainOptimizer as LightningOptimizer

__all__ = ["DataHooks", "HyperparametersMixin", "LightningDataModule", "LightningModule", "LightningOptimizer"]
MODULE_OPTIMIZERS = Any  # what ``LightningModule.optimizers()`` gives
__path__: list[str] = []


def do_nothing_closure() -> None:
    """For an optimizer whose loss is not computed anew."""


deep_names.name_below(__name__)
