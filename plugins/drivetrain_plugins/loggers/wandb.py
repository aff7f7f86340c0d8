"""Metrics, hyper-parameters, media and checkpoints for Weights & Biases, imported when the first is written."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain.launch import current_job
from drivetrain.logger import Logger, first_worker_experiment, first_worker_only
from drivetrain.unsent_checkpoints import unsent_checkpoints
from drivetrain_plugins.loggers.package import imported, require
from drivetrain_plugins.loggers.parameters import plain
from drivetrain_plugins.loggers.saved_checkpoints import aliases, description

_STEP = "trainer/global_step"


class WandbLogger(Logger):
    """Arguments and meanings are those of Lightning's WandbLogger.

    Args:
        name: of the run as it is shown.
        save_dir: folder of local files; likewise ``dir``.
        version: id of the run, to go on with it; likewise ``id``.
        offline: write locally only, to be synchronised by ``wandb sync``.
        anonymous: whether a run without an account is allowed.
        project: of the run; default: ``WANDB_PROJECT``, else ``lightning_logs``.
        log_model: upload checkpoints: ``"all"`` as they are saved, True at the end (as they are saved with
            ``save_top_k=-1``), False not.
        experiment: a run of ``wandb.init`` to write to.
        prefix: put before every metric's name, with ``-`` between.
        checkpoint_name: of the artifact.
        add_file_policy: ``"mutable"`` (a file is copied first) or ``"immutable"``.
        **kwargs: for ``wandb.init``.

    The run begins with a stage or the first write, in the process that writes: none is alive when workers are forked.

    Raises:
        ConfigurationError: ``offline`` with ``log_model``.
        MissingPackageError: wandb is not installed.
    """

    LOGGER_JOIN_CHAR = "-"  # between prefix and name
    opens_first = True  # ``sync_tensorboard`` takes what writers that begin after it write

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] | None = ".",
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: bool | str = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: str = "mutable",
        **kwargs: Any,
    ) -> None:
        if offline and log_model:
            raise ConfigurationError(
                f"WandbLogger(offline=True, log_model={log_model!r}): checkpoints cannot be uploaded offline, set one"
                " of them to False."
            )
        require("wandb", type(self).__name__)
        self._log_model = log_model
        self._prefix = prefix
        self._experiment = experiment
        self._checkpoint_name = checkpoint_name
        self.add_file_policy = add_file_policy
        folder = save_dir if save_dir is not None else dir
        self._wandb_init: dict[str, Any] = {
            "name": name,
            "project": project or os.environ.get("WANDB_PROJECT", "lightning_logs"),
            "dir": None if folder is None else os.fspath(folder),
            "id": version or id,
            "resume": "allow",
            **({"anonymous": "allow"} if anonymous else {}),
            **({"mode": "offline"} if offline else {}),
        }
        self._wandb_init.update(**kwargs)  # in these words a command line's parser finds the arguments of wandb.init
        self._of_script: str | None = None  # in a worker: the run that the script's process holds
        self._logged_model_time: dict[str, float] = {}
        self._checkpoint_callbacks: dict[int, Any] = {}  # checkpoint callbacks whose files are uploaded at the end

    # -- the run ------------------------------------------------------------------------------------------------
    @property
    @first_worker_experiment
    def experiment(self) -> Any:
        """The run, begun at the first access; one that the process has already is gone on with."""
        if self._experiment is None:
            import wandb

            with contextlib.suppress(ImportError):  # projects ask for wandb.wandb_run.Run, which Lightning's imports
                importlib.import_module("wandb.wandb_run")
            if wandb.run is not None:
                self._experiment = wandb.run
                return self._experiment
            if self._of_script is not None:
                if self._wandb_init["dir"] is not None:  # else pictures and tables lie where this process works
                    wandb.setup(wandb.Settings(root_dir=os.path.abspath(self._wandb_init["dir"])))
                self._experiment = wandb.attach(self._of_script)
                return self._experiment
            if self._wandb_init["dir"] is not None:
                os.makedirs(self._wandb_init["dir"], exist_ok=True)
            self._experiment = wandb.init(**self._wandb_init)
            if self._wandb_init.get("sync_tensorboard"):
                self._experiment.define_metric("*", step_metric="global_step")
            else:
                self._experiment.define_metric(_STEP)
                self._experiment.define_metric("*", step_metric=_STEP, step_sync=True)
        return self._experiment

    @property
    def name(self) -> str | None:
        """The project; the run's own name is ``experiment.name``."""
        return self._wandb_init["project"]

    @property
    def version(self) -> str | None:
        """The run's id, None before it begins where none was given."""
        return self._wandb_init["id"] if self._experiment is None else self._experiment.id

    def use_version(self, version: str | int | None) -> None:
        self._wandb_init["id"] = None if version is None else str(version)

    @property
    def save_dir(self) -> str | None:
        return self._wandb_init["dir"]

    def watch(
        self, model: nn.Module, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True
    ) -> None:
        """Log gradients, parameters (``log="all"``) and the graph of ``model``."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    # -- what is written ----------------------------------------------------------------------------------------
    @first_worker_only
    def log_hyperparams(self, params: Any = None, metrics: Mapping[str, float] | None = None) -> None:
        self.experiment.config.update(plain(params or {}), allow_val_change=True)
        if metrics:
            self.log_metrics(metrics)

    @first_worker_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        join = f"{self._prefix}{self.LOGGER_JOIN_CHAR}" if self._prefix else ""
        found = {f"{join}{name}": value for name, value in metrics.items()}
        if step is not None and not self._wandb_init.get("sync_tensorboard"):
            found[_STEP] = step
        self.experiment.log(found)

    @first_worker_only
    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table of ``columns`` and ``data``, or a data frame."""
        table = imported("wandb", type(self).__name__).Table(columns=columns, data=data, dataframe=dataframe)
        self.log_metrics({key: table}, step)

    @first_worker_only
    def log_text(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[str]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log text as a table."""
        self.log_table(key, columns, data, dataframe, step)

    @first_worker_only
    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images (tensors, arrays, PIL images or paths); ``kwargs`` are lists with one item an image."""
        self._log_media("Image", key, images, step, kwargs)

    @first_worker_only
    def log_audio(self, key: str, audios: list[Any], step: int | None = None, **kwargs: Any) -> None:
        """Log sounds (arrays or paths); ``kwargs`` are lists with one item a sound."""
        self._log_media("Audio", key, audios, step, kwargs)

    @first_worker_only
    def log_video(self, key: str, videos: list[Any], step: int | None = None, **kwargs: Any) -> None:
        """Log videos (arrays or paths); ``kwargs`` are lists with one item a video."""
        self._log_media("Video", key, videos, step, kwargs)

    def _log_media(self, kind: str, key: str, items: list[Any], step: int | None, options: dict[str, Any]) -> None:
        if not isinstance(items, list):
            raise TypeError(f"log_{kind.lower()}({key!r}): give a list, not a {type(items).__name__}.")
        for name, values in options.items():
            if len(values) != len(items):
                raise ValueError(f"log_{kind.lower()}({key!r}): {len(items)} items and {len(values)} of {name}.")
        make = getattr(imported("wandb", type(self).__name__), kind)
        each = [{name: values[i] for name, values in options.items()} for i in range(len(items))]
        self.log_metrics({key: [make(item, **one) for item, one in zip(items, each, strict=True)]}, step)

    # -- artifacts ----------------------------------------------------------------------------------------------
    @first_worker_only
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        if self._log_model == "all" or (self._log_model is True and checkpoint_callback.save_top_k == -1):
            self._scan_and_log_checkpoints(checkpoint_callback)
        elif self._log_model is True:
            self._checkpoint_callbacks[id(checkpoint_callback)] = checkpoint_callback

    def _scan_and_log_checkpoints(self, checkpoint_callback: Any) -> None:
        """Upload the files that are new since the last call (the name is Lightning's)."""
        wandb, run = imported("wandb", type(self).__name__), self.experiment
        for moment, path, score, _ in unsent_checkpoints(checkpoint_callback, self._logged_model_time):
            name = self._checkpoint_name or f"model-{run.id}"
            artifact = wandb.Artifact(name=name, type="model", metadata=description(checkpoint_callback, path, score))
            if Path(path).is_dir():
                artifact.add_dir(path, name="model.ckpt")
            else:
                artifact.add_file(path, name="model.ckpt", policy=self.add_file_policy)
            run.log_artifact(artifact, aliases=aliases(checkpoint_callback, path))
            self._logged_model_time[path] = moment

    @staticmethod
    @first_worker_only
    def download_artifact(
        artifact: str,
        save_dir: str | os.PathLike[str] | None = None,
        artifact_type: str | None = None,
        use_artifact: bool | None = True,
    ) -> str:
        """Download an artifact into ``save_dir``; returns its path. ``use_artifact``: note that the run used it."""
        wandb = imported("wandb", "WandbLogger")
        if wandb.run is not None and use_artifact:
            found = wandb.run.use_artifact(artifact)
        else:
            found = wandb.Api().artifact(artifact, type=artifact_type)
        return found.download(root=None if save_dir is None else os.fspath(save_dir))

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Note that the run uses ``artifact``, and return it."""
        return self.experiment.use_artifact(artifact, type=artifact_type)

    @first_worker_only
    def finalize(self, status: str) -> None:
        if self._experiment is not None and status in ("success", "completed", "stopped"):
            for callback in self._checkpoint_callbacks.values():
                self._scan_and_log_checkpoints(callback)
        job = current_job()
        own = self._of_script is None
        if self._experiment is not None and job is not None and job.origin == "local" and own:
            run, self._experiment = self._experiment, None  # a worker that was forked leaves without saying goodbye
            self._wandb_init["id"] = run.id
            run.finish()

    def __getstate__(self) -> dict[str, Any]:
        """Travels without its run. The process that writes writes to the run that this one holds, which wandb gives to
        one process only and which stays the script's to go on with, or else goes on with the run's id."""
        settings = {**self._wandb_init, "id": self.version}
        run = None if getattr(self._experiment, "_is_finished", False) else self._experiment
        held = getattr(run, "_attach_id", None)
        return {
            **self.__dict__,
            "_experiment": None,
            "_of_script": held or self._of_script,
            "_checkpoint_callbacks": {},
            "_wandb_init": settings,
        }
