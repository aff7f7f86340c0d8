"""Loggers by class name, for scripts: ``from drivetrain.loggers import CSVLogger``. Each is a plugin registered under
``drivetrain.loggers``, those of other packages too."""

from __future__ import annotations

from typing import Any

from drivetrain.logger import Logger  # noqa: F401  (offered here)
from drivetrain.offered import Offered

_OFFERED = Offered(__name__, "loggers", own=("Logger",))


def __getattr__(name: str) -> Any:
    return _OFFERED.find(name)


def __dir__() -> list[str]:
    return _OFFERED.names()
