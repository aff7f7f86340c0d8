"""drivetrain: one Trainer for PyTorch; any way of distributing the training, chosen by one word.

Importing this package imports no torch; the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.callback import Callback as Callback
    from drivetrain.data import DataModule as DataModule
    from drivetrain.declaration import Declaration as Declaration
    from drivetrain.declaration import Support as Support
    from drivetrain.logger import Logger as Logger
    from drivetrain.module import TrainModule as TrainModule
    from drivetrain.precision import Precision as Precision
    from drivetrain.seeding import seed_everything as seed_everything
    from drivetrain.strategy import Strategy as Strategy
    from drivetrain.trainer import Trainer as Trainer

_HOMES = {
    "Callback": "callback",
    "DataModule": "data",
    "Declaration": "declaration",
    "Logger": "logger",
    "Precision": "precision",
    "Strategy": "strategy",
    "Support": "declaration",
    "TrainModule": "module",
    "Trainer": "trainer",
    "seed_everything": "seeding",
}
__all__ = [*_HOMES]  # noqa: PLE0604  (they are strings)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")
    return getattr(importlib.import_module(f"drivetrain.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
