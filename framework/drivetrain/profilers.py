"""Profilers by class name, for scripts: ``from drivetrain.profilers import PyTorchProfiler``. Each is a plugin
registered under ``drivetrain.profilers``, those of other packages too."""

from __future__ import annotations

from typing import Any

from drivetrain.offered import Offered
from drivetrain.profiler import Profiler  # noqa: F401  (offered here)

_OFFERED = Offered(__name__, "profilers", own=("Profiler",))


def __getattr__(name: str) -> Any:
    return _OFFERED.find(name)


def __dir__() -> list[str]:
    return _OFFERED.names()
