"""Metrics, hyper-parameters and checkpoints for MLflow, which is imported when the first of them is written."""

from __future__ import annotations

import os
import re
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from drivetrain.logger import Logger, first_worker_experiment, first_worker_only
from drivetrain.unsent_checkpoints import unsent_checkpoints
from drivetrain_plugins.loggers.package import imported, require
from drivetrain_plugins.loggers.parameters import flatten
from drivetrain_plugins.loggers.saved_checkpoints import aliases, description

_FILE = "file:"
_LONGEST = 250  # characters of a parameter's value that every server takes
_AT_ONCE = 100  # parameters in a request, likewise
_STATUS = {"completed": "FINISHED", "stopped": "FINISHED", "success": "FINISHED", "interrupted": "KILLED"}


class MLFlowLogger(Logger):
    """Arguments and meanings are those of Lightning's MLFlowLogger.

    Args:
        experiment_name: of the experiment; it is made where there is none.
        run_name: of the run.
        tracking_uri: address of the server; default: ``MLFLOW_TRACKING_URI``, else files in ``save_dir``.
        tags: of the run.
        save_dir: folder of the files where there is no server.
        log_model: upload checkpoints: ``"all"`` as they are saved, True at the end (as they are saved with
            ``save_top_k=-1``), False not.
        prefix: put before every metric's name, with ``-`` between.
        checkpoint_path_prefix: folder of the checkpoints among the artifacts.
        artifact_location: of a new experiment.
        run_id: of a run to go on with.
        synchronous: whether a call waits until the server has it.

    Raises:
        MissingPackageError: mlflow is not installed.
    """

    LOGGER_JOIN_CHAR = "-"  # between prefix and name

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = "./mlruns",
        log_model: bool | str = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
        checkpoint_path_prefix: str = "",
    ) -> None:
        require("mlflow", type(self).__name__)
        self._experiment_name = experiment_name
        self._run_name = run_name
        folder = "./mlruns" if save_dir is None else os.fspath(save_dir)
        self._tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{_FILE}{folder}"
        self.tags = tags
        self._log_model = log_model
        self._prefix = prefix
        self._artifact_location = artifact_location
        self._run_id = run_id
        self._options = {} if synchronous is None else {"synchronous": synchronous}
        self._checkpoint_path_prefix = checkpoint_path_prefix
        self._experiment_id: str | None = None
        self._client: Any = None
        self._logged_model_time: dict[str, float] = {}
        self._checkpoint_callback: Any = None  # the checkpoint callback whose files are uploaded at the end

    # -- the run at the server ----------------------------------------------------------------------------------
    @property
    @first_worker_experiment
    def experiment(self) -> Any:
        """The ``MlflowClient``; the first access makes the experiment and the run where they are not there."""
        if self._client is None:
            mlflow = imported("mlflow", type(self).__name__)
            client = imported("mlflow.tracking", type(self).__name__).MlflowClient(self._tracking_uri)
            mlflow.set_tracking_uri(self._tracking_uri)
            if self._run_id is None:
                self._start(client)
            else:
                self._experiment_id = client.get_run(self._run_id).info.experiment_id
            self._client = client
        return self._client

    def _start(self, client: Any) -> None:
        known = client.get_experiment_by_name(self._experiment_name)
        if known is not None and known.lifecycle_stage != "deleted":
            self._experiment_id = known.experiment_id
        else:
            location = self._artifact_location
            self._experiment_id = client.create_experiment(name=self._experiment_name, artifact_location=location)
        tags = dict(self.tags or {})
        if self._run_name is not None:
            tags[imported("mlflow.utils.mlflow_tags", type(self).__name__).MLFLOW_RUN_NAME] = self._run_name
        resolve = imported("mlflow.tracking.context.registry", type(self).__name__).resolve_tags
        self._run_id = client.create_run(experiment_id=self._experiment_id, tags=resolve(tags)).info.run_id

    @property
    def run_id(self) -> str | None:
        _ = self.experiment
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        _ = self.experiment
        return self._experiment_id

    @property
    def name(self) -> str | None:
        """The experiment's id."""
        return self.experiment_id

    @property
    def version(self) -> str | None:
        """The run's id."""
        return self.run_id

    def use_version(self, version: str | int | None) -> None:
        self._run_id = None if version is None else str(version)

    @property
    def save_dir(self) -> str | None:
        """Folder of the files; None with a server."""
        return self._tracking_uri.removeprefix(_FILE) if self._tracking_uri.startswith(_FILE) else None

    # -- what is written ----------------------------------------------------------------------------------------
    @first_worker_only
    def log_hyperparams(self, params: Any = None, metrics: Mapping[str, float] | None = None) -> None:
        entities, client = imported("mlflow.entities", type(self).__name__), self.experiment
        found = [entities.Param(key=k, value=str(v)[:_LONGEST]) for k, v in flatten(params or {}).items()]
        for start in range(0, len(found), _AT_ONCE):
            client.log_batch(run_id=self._run_id, params=found[start : start + _AT_ONCE], **self._options)
        if metrics:
            self.log_metrics(metrics)

    @first_worker_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        entities, client = imported("mlflow.entities", type(self).__name__), self.experiment
        now, join, found = int(time.time() * 1000), f"{self._prefix}{self.LOGGER_JOIN_CHAR}" if self._prefix else "", []
        for name, value in metrics.items():
            if isinstance(value, str):
                warnings.warn(f"MLflow takes numbers only: {name}={value!r} is left out.", stacklevel=3)
                continue
            given = f"{join}{name}"
            key = re.sub("[^a-zA-Z0-9_/. -]+", "", given)
            if key != given:
                told = f"MLflow takes no such characters in a name: {given} is written as {key}."
                warnings.warn(told, RuntimeWarning, stacklevel=3)
            found.append(entities.Metric(key=key, value=float(value), timestamp=now, step=step or 0))
        client.log_batch(run_id=self._run_id, metrics=found, **self._options)

    @first_worker_only
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        if self._log_model == "all" or (self._log_model is True and checkpoint_callback.save_top_k == -1):
            self._scan_and_log_checkpoints(checkpoint_callback)
        elif self._log_model is True:
            self._checkpoint_callback = checkpoint_callback

    def _scan_and_log_checkpoints(self, checkpoint_callback: Any) -> None:
        """Upload the files that are new since the last call (the name is Lightning's)."""
        client = self.experiment
        for moment, path, score, _ in unsent_checkpoints(checkpoint_callback, self._logged_model_time):
            target = os.path.join(self._checkpoint_path_prefix, Path(path).stem)
            if Path(path).is_dir():
                client.log_artifacts(self._run_id, path, os.path.join(target, Path(path).name))
            else:
                client.log_artifact(self._run_id, path, target)
            with tempfile.TemporaryDirectory() as folder:
                known = description(checkpoint_callback, path, score, kind="Checkpoint")  # so MLflow's users know it
                Path(folder, "metadata.yaml").write_text(yaml.safe_dump(known), encoding="utf-8")
                Path(folder, "aliases.txt").write_text(str(aliases(checkpoint_callback, path)), encoding="utf-8")
                client.log_artifacts(self._run_id, folder, target)
            self._logged_model_time[path] = moment

    @first_worker_only
    def finalize(self, status: str = "success") -> None:
        if self._client is None:
            return
        if self._checkpoint_callback is not None and status != "failed":
            self._scan_and_log_checkpoints(self._checkpoint_callback)
        self._client.set_terminated(self._run_id, _STATUS.get(status, "FAILED"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "_checkpoint_callback": None}
