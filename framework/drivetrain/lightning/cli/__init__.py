"""Lightning's command line over drivetrain's parts: ``LightningCLI(Model, Data)`` makes a script configurable.

The parsing is jsonargparse's, as in Lightning. It is imported when a command line or its parser is made; without it
the names can be imported, annotated with and derived from.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from drivetrain.lightning import deep_names
from drivetrain.lightning.cli.command_line import LightningCLI as LightningCLI
from drivetrain.lightning.cli.instantiation import ModuleType as ModuleType
from drivetrain.lightning.cli.instantiation import instantiate_class as instantiate_class
from drivetrain.lightning.cli.instantiation import instantiate_module as instantiate_module
from drivetrain.lightning.cli.package import absent_parser
from drivetrain.lightning.cli.save_config import SaveConfigCallback as SaveConfigCallback
from drivetrain.lightning.cli.types import (
    ArgsType as ArgsType,
)
from drivetrain.lightning.cli.types import (
    LRSchedulerCallable as LRSchedulerCallable,
)
from drivetrain.lightning.cli.types import (
    LRSchedulerType as LRSchedulerType,
)
from drivetrain.lightning.cli.types import (
    LRSchedulerTypeTuple as LRSchedulerTypeTuple,
)
from drivetrain.lightning.cli.types import (
    LRSchedulerTypeUnion as LRSchedulerTypeUnion,
)
from drivetrain.lightning.cli.types import (
    OptimizerCallable as OptimizerCallable,
)
from drivetrain.lightning.cli.types import (
    ReduceLROnPlateau as ReduceLROnPlateau,
)

if TYPE_CHECKING:
    from drivetrain.lightning.cli.parser import LightningArgumentParser as LightningArgumentParser


def __getattr__(name: str) -> Any:
    if name == "LightningArgumentParser":  # derives from a class of jsonargparse
        found = absent_parser()
        return importlib.import_module(f"{__name__}.parser").LightningArgumentParser if found is None else found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "LightningArgumentParser"})


deep_names.name_below(__name__)
