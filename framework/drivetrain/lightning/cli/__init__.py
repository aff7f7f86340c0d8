"""What packages import beside their models of Lightning's command line: its annotations, and classes to derive from.

There is no such command line here: an object of its classes is refused where it is made, as without the package that
Lightning needs for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.callback import Callback
from drivetrain.lightning import deep_names
from drivetrain.lightning.refused_classes import refused

__path__: list[str] = []

ModuleType = TypeVar("ModuleType")


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's, with the name of the metric that it reads in ``monitor``."""

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]
ArgsType = list[str] | dict[str, Any] | None
OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]

LightningArgumentParser = refused("cli", "LightningArgumentParser", object)
LightningCLI = refused("cli", "LightningCLI", object)
SaveConfigCallback = refused("cli", "SaveConfigCallback", Callback)


def instantiate_class(args: Any | tuple[Any, ...], init: dict[str, Any]) -> Any:
    """An object of the class that ``init["class_path"]`` names.

    Args:
        args: what it is given by position: a tuple, or the one argument.
        init: ``class_path``, and in ``init_args`` what it is given by name.
    """
    module, _, name = init["class_path"].rpartition(".")
    positional = args if isinstance(args, tuple) else (args,)
    return getattr(importlib.import_module(module), name)(*positional, **init.get("init_args", {}))


deep_names.name_below(__name__)
