"""Lightning's profilers by class name; each is a plugin registered under ``drivetrain.profilers``."""

from __future__ import annotations

from drivetrain.lightning import deep_names
from drivetrain.lightning.plugin_names import finder
from drivetrain.profiler import PassThroughProfiler as PassThroughProfiler
from drivetrain.profiler import Profiler as Profiler

NAMES = {
    "AdvancedProfiler": "advanced",
    "PyTorchProfiler": "pytorch",
    "SimpleProfiler": "simple",
}
__all__ = ["PassThroughProfiler", "Profiler", *NAMES]  # noqa: PLE0604  (they are strings)
__path__: list[str] = []

__getattr__ = finder(__name__, "profilers", NAMES)

deep_names.name_below(__name__)
