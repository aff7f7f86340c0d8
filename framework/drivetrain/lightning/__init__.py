"""drivetrain under Lightning's names: ``import drivetrain.lightning as L`` in place of ``lightning.pytorch``.

A project that derives from ``L.LightningModule`` and trains with ``L.Trainer`` runs after changing its imports. The
Trainer is drivetrain's with Lightning's meanings (:data:`drivetrain.meanings.LIGHTNING`), the module is drivetrain's.
What lies in plugins (callbacks, loggers, profilers) is found by its registered name when it is first asked for.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from drivetrain.lightning import deep_names, not_offered

if TYPE_CHECKING:
    from drivetrain.callback import Callback as Callback
    from drivetrain.data import DataModule as LightningDataModule
    from drivetrain.lightning.logo import LIGHTNING_LOGO as LIGHTNING_LOGO
    from drivetrain.lightning.logo import cli_lightning_logo as cli_lightning_logo
    from drivetrain.lightning.seed import seed_everything as seed_everything
    from drivetrain.lightning.trainer import Trainer as Trainer
    from drivetrain.module import TrainModule as LightningModule

_HOMES = {
    "LIGHTNING_LOGO": ("drivetrain.lightning.logo", "LIGHTNING_LOGO"),
    "cli_lightning_logo": ("drivetrain.lightning.logo", "cli_lightning_logo"),
    "Callback": ("drivetrain.callback", "Callback"),
    "LightningDataModule": ("drivetrain.data", "DataModule"),
    "LightningModule": ("drivetrain.module", "TrainModule"),
    "Trainer": ("drivetrain.lightning.trainer", "Trainer"),
    "seed_everything": ("drivetrain.lightning.seed", "seed_everything"),
    "_logger": ("drivetrain.lightning.messages", "log"),  # projects give its handler a format, or log with it
    "_root_logger": ("logging", "root"),
}
_SUBMODULES = (
    "accelerators",
    "callbacks",
    "core",
    "demos",
    "fabric",
    "loggers",
    "loops",
    "overrides",
    "plugins",
    "profilers",
    "strategies",
    "trainer",
    "tuner",
    "utilities",
)
__all__ = ["Callback", "LightningDataModule", "LightningModule", "Trainer", "seed_everything"]
__version__ = "2.6.6"  # of the surface that is offered here; projects compare it

deep_names.install(__name__)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        module, attribute = _HOMES[name]
        return getattr(importlib.import_module(module), attribute)
    if name == "pytorch":  # import drivetrain.lightning as L; L.pytorch.callbacks
        return sys.modules[__name__]
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    why = not_offered.of_name("", name) or not_offered.of_module(name)
    if why is not None:
        raise AttributeError(f"{__name__}.{name} is not offered: {why}.")
    raise AttributeError(f"module 'drivetrain.lightning' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_SUBMODULES]
