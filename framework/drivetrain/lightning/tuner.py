"""Lightning's Tuner; a plugin registered as ``tuner`` under ``drivetrain.tools``."""

from __future__ import annotations

from drivetrain.lightning import deep_names
from drivetrain.lightning.plugin_names import finder

NAMES = {"Tuner": "tuner"}
__all__ = [*NAMES]  # noqa: PLE0604  (they are strings)
__path__: list[str] = []

__getattr__ = finder(__name__, "tools", NAMES, {})

deep_names.name_below(__name__)
