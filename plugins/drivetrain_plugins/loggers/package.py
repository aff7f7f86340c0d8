"""The package that a logger writes with, imported when it is first used."""

from __future__ import annotations

import importlib
from typing import Any

from drivetrain.errors import ConfigurationError


def imported(name: str, logger: str) -> Any:
    """Module ``name``, imported now.

    Raises:
        ConfigurationError: its package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != name.partition(".")[0]:
            raise
        package = name.partition(".")[0]
        raise ConfigurationError(f"{logger} needs the package {package}: pip install {package}") from None
