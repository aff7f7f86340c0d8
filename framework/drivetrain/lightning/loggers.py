"""Lightning's loggers by class name; each is a plugin registered under ``drivetrain.loggers``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drivetrain.lightning import deep_names
from drivetrain.lightning.plugin_names import finder
from drivetrain.logger import Logger as Logger
from drivetrain.logger import first_worker_experiment

LOCAL_FILE_URI_PREFIX = "file:"  # of the addresses that MLFlowLogger takes
rank_zero_experiment = first_worker_experiment  # what own loggers decorate ``experiment`` with


def merge_dicts(
    dicts: Sequence[Mapping[str, Any]],
    agg_key_funcs: Mapping[str, Any] | None = None,
    default_func: Callable[[Sequence[float]], float] = statistics.mean,
) -> dict[str, Any]:
    """One dictionary of several: what stands under one name is combined by its function in ``agg_key_funcs``, or by
    ``default_func``; dictionaries within dictionaries in the same way, ``agg_key_funcs`` being nested like them."""
    functions = agg_key_funcs or {}
    merged: dict[str, Any] = {}
    for name in {name: None for one in dicts for name in one}:
        values = [one[name] for one in dicts if one.get(name) is not None]
        function = functions.get(name)
        if isinstance(values[0], dict):
            merged[name] = merge_dicts(values, function, default_func)
        else:
            merged[name] = (function or default_func)(values)
    return merged


class DummyExperiment:
    """Does nothing, whatever is asked of it."""

    def nop(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return self.nop

    def __getitem__(self, index: int) -> DummyExperiment:
        return self

    def __setitem__(self, *args: Any, **kwargs: Any) -> None: ...


class DummyLogger(Logger):
    """Writes nothing; its experiment answers every call."""

    name = ""
    version = ""

    def __init__(self) -> None:
        self._experiment = DummyExperiment()

    @property
    def experiment(self) -> DummyExperiment:
        return self._experiment

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def __getitem__(self, index: int) -> DummyLogger:
        return self

    def __getattr__(self, name: str) -> Any:
        return DummyExperiment().nop


NAMES = {
    "CSVLogger": "lightning_csv",
    "MLFlowLogger": "mlflow",
    "TensorBoardLogger": "lightning_tensorboard",
    "WandbLogger": "wandb",
}
__all__ = ["Logger", *NAMES]  # noqa: PLE0604  (they are strings)
__path__: list[str] = []

__getattr__ = finder(__name__, "loggers", NAMES)

deep_names.name_below(__name__)
