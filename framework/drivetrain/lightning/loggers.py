"""Lightning's loggers by class name; each is a plugin registered under ``drivetrain.loggers``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drivetrain.lightning import deep_names
from drivetrain.lightning.plugin_names import finder
from drivetrain.lightning.refused_classes import refused
from drivetrain.logger import Logger as Logger
from drivetrain.logger import SilentExperiment, SilentLogger, first_worker_experiment
from drivetrain.unsent_checkpoints import unsent_checkpoints as _scan_checkpoints  # noqa: F401  (own loggers call it)

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


DummyLogger, DummyExperiment = SilentLogger, SilentExperiment  # what projects ask a run with fast_dev_run for
CometLogger = refused("loggers", "CometLogger", Logger)
LitLogger = refused("loggers", "LitLogger", Logger)
NeptuneLogger = refused("loggers", "NeptuneLogger", Logger)
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
