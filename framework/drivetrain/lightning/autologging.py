"""MLflow's autologging of Lightning, for the Trainer that stands in its place.

``mlflow.pytorch.autolog()`` puts a function of MLflow's around ``Trainer.fit`` of the packages that it knows. Where it
was called, that function is put around what this package's ``fit`` calls, so that the run gets what it got before:
optimizer and early stopping as parameters, metrics by epoch, the model, its summary. (Not around ``fit`` itself:
another tool may have put something there.) MLflow takes it off where autologging ends.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

from drivetrain.callback import Callback

_FLAVOR = "pytorch"  # MLflow's name for what it does to Lightning
_OF_EARLY_STOPPING = ("monitor", "mode", "patience", "min_delta", "stopped_epoch")


def wrap(kind: type, name: str, plain: Callable[..., Any]) -> None:
    """Put MLflow's function around the method ``name`` of ``kind``, where autologging is on and it is not there yet.

    Args:
        name: a method that nothing but this replaces.
        plain: that method as it is without MLflow's function.
    """
    if "mlflow.pytorch" not in sys.modules or vars(kind)[name] is not plain:
        return
    tools = importlib.import_module("mlflow.utils.autologging_utils")
    if tools.autologging_is_disabled(_FLAVOR):
        return
    try:
        around = importlib.import_module("mlflow.pytorch._lightning_autolog").patched_fit
    except ImportError as error:
        warnings.warn(
            f"mlflow.pytorch.autolog() writes nothing of this fit ({error}): give the Trainer an MLFlowLogger.",
            stacklevel=3,
        )
        return

    def fit(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        stopping = _early_stopping(trainer)
        if stopping is not None:
            _mlflow().log_params({name: getattr(stopping, name) for name in _OF_EARLY_STOPPING})
        joining = JoinRun(_mlflow().active_run().info.run_id, _mlflow().get_tracking_uri())
        trainer.callbacks.insert(0, joining)  # before those that write
        try:
            result = around(original, trainer, *args, **kwargs)
        finally:
            trainer.callbacks[:] = [callback for callback in trainer.callbacks if callback is not joining]
        if stopping is not None:
            _tell_of_the_end(trainer, stopping, tools)
        return result

    tools.safe_patch(_FLAVOR, kind, name, fit, manage_run=True)


class JoinRun(Callback):
    """The first worker that the Trainer starts writes to the run of the script that started it.

    A run is active in the process that began it only: what MLflow's callbacks write of a checkpoint would begin another
    one, which nobody ends.
    """

    def __init__(self, run_id: str, tracking_uri: str) -> None:
        self._run_id, self._tracking_uri = run_id, tracking_uri

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.is_global_zero and _mlflow().active_run() is None:
            _mlflow().set_tracking_uri(self._tracking_uri)
            _mlflow().start_run(run_id=self._run_id)


def _mlflow() -> Any:
    return importlib.import_module("mlflow")


def _early_stopping(trainer: Any) -> Any:
    """The first one: MLflow looks for Lightning's own class."""
    kind = importlib.import_module("drivetrain.lightning.callbacks").EarlyStopping
    return next((callback for callback in trainer.callbacks if isinstance(callback, kind)), None)


def _tell_of_the_end(trainer: Any, stopping: Any, tools: Any) -> None:
    """Where training was stopped, and the best checkpoint, under MLflow's names for them."""
    if stopping.stopped_epoch:
        restored = stopping.stopped_epoch - max(1, stopping.patience)
        of_the_end = {"stopped_epoch": stopping.stopped_epoch, "restored_epoch": restored}
        best = {"best_score": float(stopping.best_score), "wait_count": stopping.wait_count}
        _mlflow().log_metrics(of_the_end | best)
    saver = trainer.checkpoint_callback
    if saver is not None and saver.best_model_path and tools.get_autologging_config(_FLAVOR, "log_models", True):
        _mlflow().log_artifact(local_path=saver.best_model_path, artifact_path="restored_model_checkpoint")
