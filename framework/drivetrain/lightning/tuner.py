"""Lightning's Tuner; a plugin registered as ``tuner`` under ``drivetrain.tools``."""

from __future__ import annotations

import sys
from typing import Any

from drivetrain.lightning import deep_names
from drivetrain.lightning.plugin_names import finder

NAMES = {"Tuner": "tuner"}
__all__ = [*NAMES]  # noqa: PLE0604  (they are strings)
__path__: list[str] = []

_find = finder(__name__, "tools", NAMES)


def __getattr__(name: str) -> Any:
    if name == "_LRFinder":  # what Tuner.lr_find gives, under the name that projects annotate with
        return sys.modules[_find("Tuner").__module__].LearningRateRange
    return _find(name)


deep_names.name_below(__name__)
