"""The package that a logger writes with: asked for when the logger is made, imported when it is first used."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from drivetrain.errors import MissingPackageError


def require(package: str, logger: str) -> None:
    """Nothing, where ``package`` is installed. Workers would start for a logger that cannot write.

    Raises:
        MissingPackageError: it is not.
    """
    if sys.modules.get(package) is None and find_spec(package) is None:
        raise _missing(package, logger)


def imported(name: str, logger: str) -> Any:
    """Module ``name``, imported now.

    Raises:
        MissingPackageError: its package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != name.partition(".")[0]:
            raise
        package = name.partition(".")[0]
        raise _missing(package, logger) from None


def _missing(package: str, logger: str) -> MissingPackageError:
    return MissingPackageError(f"{logger} needs the package {package}: pip install {package}")
