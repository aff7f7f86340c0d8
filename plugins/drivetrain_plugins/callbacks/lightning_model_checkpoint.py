"""ModelCheckpoint by Lightning's rules: when it saves, what the files are called, which of them stay."""

from __future__ import annotations

import logging
import os
import re
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from drivetrain import checkpoint
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain_plugins.callbacks.checkpoint import Checkpoint
from drivetrain_plugins.callbacks.monitor import check_mode, has_validation, missing, worst
from drivetrain_plugins.callbacks.on_exception import save_on_exception

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer

log = logging.getLogger(__name__)
_STATE = ("best_model_score", "current_score", "best_k_models", "kth_best_model_path", "kth_value", "last_model_path")


class ModelCheckpoint(Checkpoint):
    """The ModelCheckpoint of :mod:`drivetrain.lightning`. Arguments, attributes and the files after a run are those of
    Lightning 2.6; drivetrain's own (``model_checkpoint``) is stricter about ``last.ckpt``.

    It saves at the end of the training epoch; where validation comes in the midst of epochs or not in each of them, at
    the end of validation; or every so many steps or seconds. ``save_last=True`` writes one more file, ``last.ckpt``,
    whenever a checkpoint is saved; ``"link"`` makes it a link.

    Better than there: with several workers the first decides what is saved and under which name (metrics that ranks
    know differently cannot part them), and ``save_on_exception`` never waits for another worker.

    Args:
        dirpath: folder; by default the first logger's ``save_dir/name/version_N/checkpoints``.
        filename: template such as ``"{epoch:02d}-{val_loss:.3f}"``; ``"{epoch}-{step}"`` by default.
        monitor: metric that ranks the checkpoints; None keeps the newest.
        verbose: report each save.
        save_last: see above.
        save_top_k: how many to keep; -1 for all, 0 for none.
        save_on_exception: save when an exception ends training.
        save_weights_only: leave out optimizers, schedulers and callbacks.
        mode: ``"min"`` or ``"max"``.
        auto_insert_metric_name: put ``name=`` before the values.
        every_n_train_steps, train_time_interval, every_n_epochs: at most one of them; default every epoch.
        save_on_train_epoch_end: force the end of the training epoch (True) or of validation (False).
        enable_version_counter: append ``-v1``, ``-v2``, ... where the name is taken, else write over it.

    Raises:
        ConfigurationError: arguments that exclude each other.
        TrainingError: the monitor was not logged by the end of an epoch with validation.
    """

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        self.dirpath: str | None = os.path.realpath(os.path.expanduser(dirpath)) if dirpath else None
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self._save_on_train_epoch_end = save_on_train_epoch_end
        self._enable_version_counter = enable_version_counter
        nothing_given = every_n_train_steps is None and every_n_epochs is None and train_time_interval is None
        self._every_n_train_steps = every_n_train_steps or 0
        self._every_n_epochs = int(nothing_given) if every_n_epochs is None else every_n_epochs
        self._train_time_interval = train_time_interval
        self._check()
        self.best_k_models: dict[str, Tensor] = {}
        self.best_model_path = ""
        self.best_model_score: Tensor | None = None
        self.kth_best_model_path = ""
        self.kth_value = torch.tensor(worst(mode))
        self.current_score: Tensor | None = None
        self.last_model_path = ""
        self._last_global_step_saved = 0
        self._last_checkpoint_saved = ""
        self._last_time_checked: float | None = None
        self._deferred = False  # a save that was due before its metric was there

    def _check(self) -> None:
        check_mode("ModelCheckpoint", self.mode)
        for name in ("save_top_k", "every_n_train_steps", "every_n_epochs"):
            value, least = getattr(self, name), -1 if name == "save_top_k" else 0
            if value < least:
                raise ConfigurationError(f"ModelCheckpoint({name}={value}): use {least} or more.")
        triggers = (self._every_n_train_steps, self._every_n_epochs, self._train_time_interval is not None)
        if sum(bool(trigger) for trigger in triggers) > 1:
            raise ConfigurationError(
                "ModelCheckpoint(): every_n_train_steps, train_time_interval and every_n_epochs exclude each other;"
                " give one, and use a second ModelCheckpoint for another."
            )
        if self.monitor is None and self.save_top_k not in (-1, 0, 1):
            raise ConfigurationError(
                f"ModelCheckpoint(save_top_k={self.save_top_k}) needs a monitor to rank the checkpoints; without one"
                " use -1, 0 or 1."
            )

    @property
    def state_key(self) -> str:
        parts = {
            "monitor": self.monitor,
            "mode": self.mode,
            "every_n_train_steps": self._every_n_train_steps,
            "every_n_epochs": self._every_n_epochs,
            "train_time_interval": self._train_time_interval,
        }
        return f"{type(self).__qualname__}{parts!r}"

    @property
    def every_n_epochs(self) -> int:
        return self._every_n_epochs

    @property
    def every_n_train_steps(self) -> int:
        return self._every_n_train_steps

    # -- when ---------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        found = self.dirpath or _default_folder(trainer)
        if trainer.communicator.world_size > 1:  # the first worker says which folder it is
            found = trainer.communicator.all_gather_plain(found)[0]
        self.dirpath = found
        if stage == "fit" and trainer.is_global_zero and self.save_top_k != 0 and _filled(found):
            warnings.warn(f"the folder of checkpoints {found} is not empty.", stacklevel=2)

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._last_time_checked = _clock(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.between_steps:
            return  # among the micro-batches of a window nothing can be saved
        every = self._every_n_train_steps
        by_step = every > 0 and trainer.global_step % every == 0
        if not (self._due_by_time(trainer) or by_step):
            return
        candidates = self._monitor_candidates(trainer)
        absent = self.monitor is not None and self.monitor not in candidates
        # A metric of an earlier validation must not rank what the next one, due now, will measure.
        stale = (
            self.monitor is not None
            and pl_module.automatic_optimization
            and trainer.is_last_batch
            and not self._should_save_on_train_epoch_end(trainer)
            and _validates_in_this_epoch(trainer)
        )
        if absent or stale:
            self._deferred = True
        elif not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._should_skip_saving_checkpoint(trainer) or self._should_save_on_train_epoch_end(trainer):
            return
        if self._deferred:
            self._deferred = False
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)
        else:
            self._save_by_epoch(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if not self._should_skip_saving_checkpoint(trainer) and self._should_save_on_train_epoch_end(trainer):
            self._save_by_epoch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self.save_last and not self._last_checkpoint_saved and not trainer.fast_dev_run:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
        if not self.save_on_exception or trainer.fast_dev_run or trainer.sanity_checking:
            return
        if self._last_global_step_saved != trainer.global_step:
            values = _with_counters(trainer, trainer.callback_metrics)
            save_on_exception(trainer, self.format_checkpoint_name(values), exception)

    def save_now(self, trainer: Trainer) -> str:
        """Save where training stands, whatever is due; all ranks call it at the same step. Returns the path."""
        if trainer.fast_dev_run or self.dirpath is None:
            return ""
        if self._last_global_step_saved != trainer.global_step:
            path = self._free_name(trainer, self._monitor_candidates(trainer), None, "")
            self._save_checkpoint(trainer, path)
        return self._last_checkpoint_saved

    def _save_by_epoch(self, trainer: Trainer) -> None:
        candidates = self._monitor_candidates(trainer)
        every = self._every_n_epochs
        if every >= 1 and (trainer.current_epoch + 1) % every == 0:
            self._save_topk_checkpoint(trainer, candidates)
        linked = self.save_last == "link" and self._last_checkpoint_saved
        if self._last_global_step_saved == trainer.global_step or linked:
            self._save_last_checkpoint(trainer, candidates)

    def _due_by_time(self, trainer: Trainer) -> bool:
        if self._train_time_interval is None:
            return False
        now, before = _clock(trainer), self._last_time_checked
        if before is None or now - before < self._train_time_interval.total_seconds():
            return False
        self._last_time_checked = now
        return True

    def _should_save_on_train_epoch_end(self, trainer: Trainer) -> bool:
        """Whether the training epoch's end is the moment, and not validation's."""
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        if trainer.check_val_every_n_epoch != 1:
            return False
        return not has_validation(trainer) or trainer.val_check_interval == 1.0

    def _should_skip_saving_checkpoint(self, trainer: Trainer) -> bool:
        return (
            bool(trainer.fast_dev_run)
            or trainer.stage != "fit"
            or trainer.sanity_checking
            or self._last_global_step_saved == trainer.global_step
        )

    # -- what ---------------------------------------------------------------------------------------------------
    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        """The metrics, epoch and step; the first worker's, on every worker."""
        known = {name: torch.as_tensor(value) for name, value in trainer.callback_metrics.items()}
        communicator = trainer.communicator
        if communicator.world_size > 1:
            plain = {name: float(value) for name, value in known.items()}
            first = communicator.all_gather_plain(plain)[0]
            kind = torch.get_default_dtype()
            known = {n: torch.tensor(v, dtype=known[n].dtype if n in known else kind) for n, v in first.items()}
        return _with_counters(trainer, known)

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if self.save_top_k == 0:
            return
        if self.monitor is None:
            self._save_none_monitor_checkpoint(trainer, monitor_candidates)
            return
        current = monitor_candidates.get(self.monitor)
        if current is None and has_validation(trainer) and trainer.check_val_every_n_epoch == 1:
            raise missing("ModelCheckpoint", self.monitor, trainer)
        if current is None:
            warnings.warn(f"{missing('ModelCheckpoint', self.monitor, trainer)}", stacklevel=2)
        elif self.check_monitor_top_k(trainer, current):
            self._update_best_and_save(current, trainer, monitor_candidates)
        elif self.verbose and trainer.is_global_zero:
            log.info(
                "epoch %d, step %d: %s is not among the best %d",
                trainer.current_epoch,
                trainer.global_step,
                self.monitor,
                self.save_top_k,
            )

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Whether a checkpoint of this score would be kept."""
        if current is None:
            return False
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return True
        kth = self.best_k_models[self.kth_best_model_path]
        return bool(current < kth if self.mode == "min" else current > kth)

    def _save_none_monitor_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        path = self._free_name(trainer, monitor_candidates, None, self.best_model_path)
        previous, self.best_model_path = self.best_model_path, path  # it is part of the state that is saved
        self._save_checkpoint(trainer, path)
        if self.save_top_k == 1 and previous:
            self._remove(trainer, previous, path)

    def _update_best_and_save(self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        before = {name: getattr(self, name) for name in (*_STATE, "best_model_path")}
        models, leaving = dict(self.best_k_models), None
        if self.save_top_k != -1 and len(models) == self.save_top_k:
            leaving = self.kth_best_model_path
            del models[leaving]
        if torch.isnan(current):
            current = torch.full_like(current, worst(self.mode))
        path = self._free_name(trainer, monitor_candidates, None, leaving or "")
        models[path] = current
        lowest, highest = min(models, key=lambda p: float(models[p])), max(models, key=lambda p: float(models[p]))
        best, last = (lowest, highest) if self.mode == "min" else (highest, lowest)
        self.best_k_models, self.current_score = models, current
        if self.save_top_k == -1 or len(models) == self.save_top_k:
            self.kth_best_model_path, self.kth_value = last, models[last]
        self.best_model_path, self.best_model_score = best, models[best]
        try:
            self._save_checkpoint(trainer, path)
        except BaseException:
            for name, value in before.items():
                setattr(self, name, value)
            raise
        if leaving:
            self._remove(trainer, leaving, path)

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if not self.save_last:
            return
        path = self._free_name(trainer, monitor_candidates, self.CHECKPOINT_NAME_LAST, self.last_model_path)
        previous, self.last_model_path = self.last_model_path, path
        if self.save_last == "link" and self._last_checkpoint_saved and self.save_top_k != 0:
            if trainer.is_global_zero:
                _link(self._last_checkpoint_saved, path)
        else:
            self._save_checkpoint(trainer, path)
        if previous:
            self._remove(trainer, previous, path)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        trainer.save_checkpoint(filepath, self.save_weights_only)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if self.verbose and trainer.is_global_zero:
            log.info("epoch %d, step %d: saved %s", trainer.current_epoch, trainer.global_step, filepath)
        for logger in trainer.loggers if trainer.is_global_zero else []:
            logger.after_save_checkpoint(self)

    # -- names --------------------------------------------------------------------------------------------------
    def format_checkpoint_name(
        self,
        metrics: dict[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Path that a checkpoint with these ``metrics`` (``epoch`` and ``step`` among them) would get; a metric that is
        not there counts as 0."""
        join = self.CHECKPOINT_JOIN_CHAR
        template = filename or self.filename or f"{{epoch}}{join}{{step}}"
        name = re.sub(r"\{([^{}:]*)(:[^{}]*)?\}", lambda match: self._field(match, metrics), template)
        parts = [part for part in (prefix, name, None if ver is None else f"v{ver}") if part is not None]
        return os.path.join(self.dirpath or "", join.join(parts) + self.FILE_EXTENSION)

    def _field(self, match: re.Match[str], metrics: Mapping[str, Any]) -> str:
        name, spec = match[1], (match[2] or ":")[1:]
        value = metrics.get(name, 0)
        try:
            text = format(value.item() if isinstance(value, Tensor) else value, spec)
        except ValueError as error:
            raise ConfigurationError(
                f"ModelCheckpoint(filename=...): {match[0]} is not a format for a number ({error})."
            ) from error
        return f"{name}{self.CHECKPOINT_EQUALS_CHAR}{text}" if self.auto_insert_metric_name else text

    def _free_name(self, trainer: Trainer, metrics: dict[str, Tensor], name: str | None, replaced: str) -> str:
        """A path that is not taken, or by what this save replaces."""
        path = self.format_checkpoint_name(metrics, name)
        version = self.STARTING_VERSION
        while self._enable_version_counter and path != replaced and self.file_exists(path, trainer):
            path = self.format_checkpoint_name(metrics, name, ver=version)
            version += 1
        return path

    def file_exists(self, filepath: str | os.PathLike[str], trainer: Trainer) -> bool:
        """Whether the first worker sees a file there; every worker must ask."""
        found = trainer.is_global_zero and os.path.exists(filepath)
        if trainer.communicator.world_size > 1:
            found = bool(trainer.communicator.all_gather_plain(found)[0])
        return found

    def _remove(self, trainer: Trainer, path: str, current: str) -> None:
        """Delete a checkpoint that another took the place of, unless it lies elsewhere or the run began from it."""
        resumed = trainer.ckpt_path
        target = Path(path).absolute()
        if path == current or (resumed is not None and Path(resumed).absolute() == target):
            return
        if Path(str(self.dirpath)).absolute() not in target.parents or not trainer.is_global_zero:
            return
        self._remove_checkpoint(trainer, path)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        target = Path(filepath)
        try:
            if target.is_dir() and not target.is_symlink():
                checkpoint.remove(target)
            else:
                target.unlink(missing_ok=True)
        except (CheckpointError, OSError) as error:
            log.warning("an old checkpoint stays: %s", error)

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Write path and score of the checkpoints that are kept, by default to ``best_k_models.yaml`` beside them."""
        import yaml

        path = Path(filepath) if filepath is not None else Path(str(self.dirpath)) / "best_k_models.yaml"
        path.write_text(yaml.dump({name: score.item() for name, score in self.best_k_models.items()}), encoding="utf-8")

    # -- resuming -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        names = ("monitor", *_STATE, "best_model_path", "dirpath")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the folder of the checkpoint; where another one is used now, only its best is remembered. A
        callback that was never set up takes the folder over: the caller's own, once its workers are done."""
        if self.dirpath is None:
            self.dirpath = state_dict.get("dirpath")
            self.current_score = state_dict.get("current_score")
        if self.dirpath == state_dict.get("dirpath", self.dirpath):
            for name in _STATE:
                if name != "current_score":
                    setattr(self, name, state_dict.get(name, getattr(self, name)))
        else:
            warnings.warn(
                f"checkpoints were kept in {state_dict['dirpath']} and are now in {self.dirpath}: of the former ones"
                " only the best is remembered.",
                stacklevel=2,
            )
        self.best_model_path = state_dict["best_model_path"]


def _with_counters(trainer: Trainer, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics with the whole numbers ``epoch`` and ``step``, which a module may have logged itself."""
    counters = {}
    for name, value in (("epoch", trainer.current_epoch), ("step", trainer.global_step)):
        logged = metrics.get(name)
        counters[name] = logged.int() if isinstance(logged, Tensor) else torch.tensor(value)
    return {**metrics, **counters}


def _default_folder(trainer: Trainer) -> str:
    """The first logger's folder, or the trainer's."""
    logger = trainer.logger
    save_dir = getattr(logger, "save_dir", None)
    if logger is None or (save_dir is None and logger.version is None):
        return os.path.join(trainer.log_dir or trainer.default_root_dir, "checkpoints")
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return os.path.join(save_dir or trainer.default_root_dir, str(logger.name), version, "checkpoints")


def _filled(folder: str) -> bool:
    return os.path.isdir(folder) and bool(os.listdir(folder))


def _clock(trainer: Trainer) -> float:
    """Seconds; with several workers those that they agreed on, which move at boundaries only."""
    return time.monotonic() if trainer.communicator.world_size == 1 else trainer.agreed_seconds


def _validates_in_this_epoch(trainer: Trainer) -> bool:
    every = trainer.check_val_every_n_epoch
    return has_validation(trainer) and (every is None or (trainer.current_epoch + 1) % every == 0)


def _link(target: str, link: str) -> None:
    """Make ``link`` a relative link to ``target``; at every instant it is the old or the new one."""
    if os.path.abspath(target) == os.path.abspath(link):
        return
    if os.path.isdir(link) and not os.path.islink(link):
        checkpoint.remove(link)
    fresh = f"{link}.linking"
    if os.path.lexists(fresh):
        os.unlink(fresh)
    os.symlink(os.path.relpath(target, os.path.dirname(link)), fresh)
    os.replace(fresh, link)
