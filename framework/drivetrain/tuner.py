"""The search for a learning rate and a batch size, for scripts: ``from drivetrain.tuner import Tuner``."""

from __future__ import annotations

from typing import Any

from drivetrain.offered import Offered

_OFFERED = Offered(__name__, "tools")


def __getattr__(name: str) -> Any:
    return _OFFERED.find(name)


def __dir__() -> list[str]:
    return _OFFERED.names()
