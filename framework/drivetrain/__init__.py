"""drivetrain: one Trainer for PyTorch; any way of distributing the training, chosen by one word.

Importing this package imports no torch; the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.callback import Callback as Callback
    from drivetrain.comm.gradients import aggregate_gradients as aggregate_gradients
    from drivetrain.comm.synchronize import synchronize_model as synchronize_model
    from drivetrain.data import DataModule as DataModule
    from drivetrain.data_partition import DataPartitioner as DataPartitioner
    from drivetrain.declaration import Declaration as Declaration
    from drivetrain.declaration import Support as Support
    from drivetrain.flat_parameters import get_parameters as get_parameters
    from drivetrain.flat_parameters import set_parameters as set_parameters
    from drivetrain.launch.information import get_distributed_info as get_distributed_info
    from drivetrain.learning_rate import scale_lr as scale_lr
    from drivetrain.logger import Logger as Logger
    from drivetrain.module import TrainModule as TrainModule
    from drivetrain.precision import Precision as Precision
    from drivetrain.seeding import seed_everything as seed_everything
    from drivetrain.strategy import Strategy as Strategy
    from drivetrain.trainer import Trainer as Trainer
    from drivetrain.workload import balance_workload as balance_workload

_HOMES = {
    "Callback": "callback",
    "DataModule": "data",
    "DataPartitioner": "data_partition",
    "Declaration": "declaration",
    "Logger": "logger",
    "Precision": "precision",
    "Strategy": "strategy",
    "Support": "declaration",
    "TrainModule": "module",
    "Trainer": "trainer",
    "aggregate_gradients": "comm.gradients",
    "balance_workload": "workload",
    "get_distributed_info": "launch.information",
    "get_parameters": "flat_parameters",
    "scale_lr": "learning_rate",
    "seed_everything": "seeding",
    "set_parameters": "flat_parameters",
    "synchronize_model": "comm.synchronize",
}
__all__ = [*_HOMES]  # noqa: PLE0604  (they are strings)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")
    return getattr(importlib.import_module(f"drivetrain.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
