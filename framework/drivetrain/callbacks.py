"""Callbacks by class name, for scripts: ``from drivetrain.callbacks import EarlyStopping, ModelCheckpoint``. Each is a
plugin registered under ``drivetrain.callbacks``, those of other packages too."""

from __future__ import annotations

from typing import Any

from drivetrain.callback import Callback  # noqa: F401  (offered here)
from drivetrain.offered import Offered

_OFFERED = Offered(__name__, "callbacks", own=("Callback",))


def __getattr__(name: str) -> Any:
    return _OFFERED.find(name)


def __dir__() -> list[str]:
    return _OFFERED.names()
