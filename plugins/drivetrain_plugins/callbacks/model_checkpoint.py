"""ModelCheckpoint: when to save, under which name, and which of the saved ones to keep."""

from __future__ import annotations

import logging
import math
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.checkpoint.shared import refuse_unshared
from drivetrain.dependent_options import Dependent
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain_plugins.callbacks.checkpoint_name import EXTENSION, format_name, goes_without_version, path_of_first
from drivetrain_plugins.callbacks.checkpoint_options import CheckpointOptions
from drivetrain_plugins.callbacks.monitor import has_validation, missing, worst
from drivetrain_plugins.callbacks.retention import Kept, Retention, worst_of

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer

log = logging.getLogger(__name__)
LAST = f"last{EXTENSION}"
# What Lightning's ModelCheckpoint keeps in a checkpoint, so that it can go on from ours.
_OF_LIGHTNING = (
    "monitor",
    "best_model_score",
    "best_k_models",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
    "current_score",
)


class ModelCheckpoint(CheckpointOptions):
    """Arguments and meanings are those of Lightning's ModelCheckpoint, with these differences.

    - Where there is validation it saves at its end, else at the end of the training epoch. A ``monitor`` that is
      only logged later in the epoch than that moves the save to the epoch's end.
    - ``save_last``: ``last.ckpt`` is always a relative link to a complete checkpoint. ``True`` saves at every
      trigger, also what is not among the top k; ``"link"`` only follows the top k (and is ``True`` for
      ``save_top_k=0``).
    - A checkpoint beyond the top k is deleted only when the one that replaces it is complete. What a kill left over
      is deleted after resuming.

    All ranks decide alike without communication: metrics, steps and the clock are agreed before they come here.

    The arguments are those of :class:`CheckpointOptions`; ``dirpath`` is ``<log_dir or default_root_dir>/checkpoints``
    by default.

    Raises:
        ConfigurationError: arguments that exclude each other; in ``setup``, a folder that cannot be written.
        TrainingError: the monitor was not logged by the end of the epoch.
    """

    dependents = (Dependent("mode", {".monitor": "val/loss"}, lambda plan, own: own["monitor"] is not None),)

    def _fresh(self) -> None:
        interval = self._train_time_interval
        self._seconds = None if interval is None else interval.total_seconds()
        self._retention = Retention(self.save_top_k, self.mode, ranked=self.monitor is not None)
        self._kept = Kept()
        self._fitting = False
        self._names: set[str] = set()  # file names in the folder, the same on every rank
        self._elsewhere = ""  # best checkpoint of a resumed run that lies in another folder
        self._saved_at = 0  # global step of the last save
        self._seconds_at: float | None = None  # agreed clock at the last save by time
        self._warned = False

    def _check(self) -> None:
        super()._check()
        interval = self._train_time_interval
        self._need(interval is None or interval > timedelta(0), "train_time_interval", "use a positive duration")
        self._need(
            self.save_last in (None, True, False, "link"), f"save_last={self.save_last!r}", "use True, False or 'link'"
        )
        self._need(
            not (self.save_last and self.filename and "/" in _without_fields(self.filename)),
            f"filename={self.filename!r}",
            "it has folders, so last.ckpt cannot point at it; leave save_last out or put the folder into dirpath",
        )

    # -- what users read ----------------------------------------------------------------------------------------
    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint (the newest without a monitor), or ``""``."""
        return self._path(self._kept.best) or self._elsewhere

    @property
    def best_model_score(self) -> torch.Tensor | None:
        return None if self._kept.score is None else _score_tensor(self._kept.score)

    @property
    def last_model_path(self) -> str:
        """Path of ``last.ckpt``, or ``""``."""
        return self._path(LAST) if self._kept.newest and self.save_last else ""

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        """Path to score of the checkpoints that are kept."""
        return {self._path(name): _score_tensor(score) for name, score in self._kept.scores.items()}

    @property
    def kth_best_model_path(self) -> str:
        """Path of the worst one kept, or ``""``."""
        return self._path(worst_of(self._kept.scores, self.mode)) if self._kept.scores else ""

    @property
    def kth_value(self) -> torch.Tensor:
        """Score of the worst one kept; without any, the one that every other improves on."""
        if not self._kept.scores:
            return _score_tensor(worst(self.mode))
        return _score_tensor(self._kept.scores[worst_of(self._kept.scores, self.mode)])

    @property
    def current_score(self) -> torch.Tensor | None:
        return None if self._kept.current is None else _score_tensor(self._kept.current)

    def format_checkpoint_name(
        self, metrics: dict[str, Any], filename: str | None = None, ver: int | None = None
    ) -> str:
        """Path that a checkpoint with these ``metrics`` (``epoch`` and ``step`` among them) would get, in version
        ``ver`` of the name where that is taken. Subclasses may make names of their own in it; with several workers it
        is the first one's that counts."""
        name = format_name(filename or self.filename, metrics, insert_names=self.auto_insert_metric_name)
        return self._path(f"{name}{EXTENSION}" if ver is None else f"{name}-v{ver}{EXTENSION}")

    def _path(self, name: str) -> str:
        return name and str(Path(self.dirpath or "") / name)

    # -- when ---------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._fitting = False
        if stage != "fit":
            return
        root = self.dirpath
        if root is None:
            root = str(Path(trainer.log_dir or trainer.default_root_dir).absolute() / "checkpoints")
        root = root or os.getcwd()
        found: list[Any] = [root, [], None, self.filename]
        if trainer.is_global_zero and not trainer.fast_dev_run:
            found = [*_look(root), self.filename]
        # The first rank says which folder it is, what lies there and what files are called: ranks may have made names
        # of their own, with a time in them, and which checkpoints are kept goes by name.
        everyone = trainer.strategy.everyone
        if everyone.world_size > 1:
            found = everyone.all_gather_plain(found)[0]
        self.dirpath, names, problem, self.filename = found
        self._names = set(names)
        if problem is not None:
            raise ConfigurationError(
                f"checkpoints cannot be written to {self.dirpath} ({problem}): choose another dirpath or make it"
                " writable."
            )
        if trainer.num_nodes > 1 and not trainer.fast_dev_run:
            refuse_unshared(Path(found[0]), everyone)

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        """Take up what a checkpoint said of the folder, as far as it is still there."""
        self._fitting, self._seconds_at = True, None
        self._saved_at = min(self._saved_at, trainer.global_step)
        self._delete(trainer, self._kept.doomed)
        self._kept = self._kept.present(self._names, self.mode)

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._fitting = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.between_steps:
            return  # among the micro-batches of a window nothing can be saved
        due = self._by_step(trainer)
        if self._seconds is not None:
            now = trainer.agreed_seconds  # moves at log boundaries, on all ranks alike
            if self._seconds_at is None:
                self._seconds_at = now
            elif now - self._seconds_at >= self._seconds:
                self._seconds_at, due = now, True
        if due and not self._skips(trainer):
            self._save(trainer, late=False)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._save_on_train_epoch_end or not self._due_by_epoch(trainer):
            return
        if self._save_on_train_epoch_end is None and self.monitor not in (None, *trainer.callback_metrics):
            self._save_on_train_epoch_end = True  # it is logged by the training epoch, which is not over
            return
        self._save(trainer, late=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        forced = self._save_on_train_epoch_end
        here = not has_validation(trainer) if forced is None else forced
        if here and self._due_by_epoch(trainer):
            self._save(trainer, late=True)

    def _due_by_epoch(self, trainer: Trainer) -> bool:
        return self._by_epoch(trainer) and not self._skips(trainer)

    def _saved_step(self) -> int:
        return self._saved_at

    def _path_on_exception(self, trainer: Trainer) -> str:
        return self._path(self._name(trainer, [], alone=True))

    def _skips(self, trainer: Trainer) -> bool:
        return (
            bool(trainer.fast_dev_run)
            or not self._fitting
            or trainer.sanity_checking
            or trainer.global_step == self._saved_at
        )

    def save_now(self, trainer: Trainer) -> str:
        """Save where training stands, whatever is due; all ranks call it at the same step. Returns the path.

        The checkpoint is the newest and no more: it takes no place among the top k and goes with the next save. What
        is due at this step is still due after resuming.
        """
        if trainer.fast_dev_run or self.dirpath is None:
            return ""
        if trainer.global_step != self._saved_at or not self._kept.newest:
            name = self._name(trainer, self._retention.leaving(self._kept, enters=False))
            kept = self._retention.after(self._kept, name, self._kept.current, enters=False)
            self._commit(trainer, kept, name, saved_at=self._saved_at)
        return self._path(self._kept.newest)

    # -- what ---------------------------------------------------------------------------------------------------
    def _save(self, trainer: Trainer, late: bool) -> None:
        """One trigger. ``late``: by now the monitor must have been logged."""
        score = self._score(trainer, late)
        enters = self._retention.enters(self._kept, score)
        if not enters and not (self.save_last is True or (self.save_last == "link" and self.save_top_k == 0)):
            self._kept.current = score
            return
        name = self._name(trainer, self._retention.leaving(self._kept, enters))
        self._commit(trainer, self._retention.after(self._kept, name, score, enters), name)

    def _commit(self, trainer: Trainer, kept: Kept, name: str, saved_at: int | None = None) -> None:
        """Save, then move ``last``, then delete. The new state is in the checkpoint, so it is set before."""
        before, self._kept = self._kept, kept
        step_before, self._saved_at = self._saved_at, trainer.global_step if saved_at is None else saved_at
        elsewhere, self._elsewhere = self._elsewhere, "" if kept.best else self._elsewhere
        try:
            trainer.save_checkpoint(Path(self._path(name)), weights_only=self.save_weights_only)
        except BaseException:
            self._kept, self._saved_at, self._elsewhere = before, step_before, elsewhere
            raise
        self._names.add(name)
        if self.save_last and trainer.is_global_zero:
            from drivetrain import checkpoint

            checkpoint.point_last(str(self.dirpath), name)
        self._delete(trainer, kept.doomed)
        kept.doomed = []
        if self.verbose and trainer.is_global_zero:
            score = "" if self.monitor is None else f", {self.monitor}={kept.current}"
            log.info("epoch %d, step %d%s: saved %s", trainer.current_epoch, trainer.global_step, score, name)

    def _score(self, trainer: Trainer, late: bool) -> float | None:
        if self.monitor is None:
            return None
        metric = trainer.monitored(self.monitor)
        if metric is None:
            if late:
                raise missing("ModelCheckpoint", self.monitor, trainer.callback_metrics, trainer.global_step)
            if not self._warned and trainer.is_global_zero:
                log.warning("%s is not logged yet at step %d: nothing to rank", self.monitor, trainer.global_step)
            self._warned = True
            return None
        value = float(metric)
        return worst(self.mode) if math.isnan(value) else value

    def check_monitor_top_k(self, trainer: Trainer, current: torch.Tensor | None = None) -> bool:
        """Whether ``current`` would be kept."""
        score = None if current is None else worst(self.mode) if current.isnan() else float(current)
        return self._retention.enters(self._kept, score)

    def _name(self, trainer: Trainer, leaving: list[str], alone: bool = False) -> str:
        """A file name that is free, or held by a checkpoint that this save replaces. ``alone``: of this rank, which
        asks no other."""
        values: dict[str, Any] = {
            **trainer.callback_metrics,
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
        }
        candidate = self._version_of_name(trainer, values, None, alone)
        if not self._enable_version_counter:
            return candidate
        taken = set(self._names)
        for other in trainer.callbacks:
            if isinstance(other, ModelCheckpoint) and other.dirpath == self.dirpath:
                taken |= other._names
        taken -= set(leaving)
        version = 0
        while candidate in taken or candidate == LAST:
            version, former = version + 1, candidate
            candidate = self._version_of_name(trainer, values, version, alone)
            if candidate == former:
                raise goes_without_version(self, self._path(candidate))
        return candidate

    def _version_of_name(self, trainer: Trainer, values: dict[str, Any], version: int | None, alone: bool) -> str:
        """What :meth:`format_checkpoint_name` says, as a name within the folder."""
        if type(self).format_checkpoint_name is ModelCheckpoint.format_checkpoint_name:
            name = format_name(self.filename, values, insert_names=self.auto_insert_metric_name)
            return f"{name}{EXTENSION}" if version is None else f"{name}-v{version}{EXTENSION}"
        path = self.format_checkpoint_name(values, ver=version)
        path = path if alone else path_of_first(trainer, path)  # ranks may make others, with a time in them
        path = path if path.endswith(EXTENSION) else f"{path}{EXTENSION}"
        folder = os.path.abspath(self.dirpath or os.curdir)
        name = os.path.relpath(path, folder) if os.path.dirname(path) else path
        if name.startswith(os.pardir):
            raise ConfigurationError(
                f"{type(self).__name__}.format_checkpoint_name gives {path!r}, not in {folder}: set dirpath for the"
                " folder."
            )
        return name

    def _delete(self, trainer: Trainer, names: list[str]) -> None:
        for name in names:
            path = Path(self._path(name))
            if name not in self._names or self._resumed_from(trainer, path):
                continue
            self._names.discard(name)
            if trainer.is_global_zero and path.exists():
                from drivetrain import checkpoint

                try:
                    checkpoint.remove(path)
                except CheckpointError as error:
                    log.warning("an old checkpoint stays: %s", error)

    # -- resuming -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return {
            **self._kept.state_dict(),
            "dirpath": self.dirpath,
            "best_model_path": self.best_model_path,
            "saved_at": self._saved_at,
            "names": sorted(self._names),
            **{name: getattr(self, name) for name in _OF_LIGHTNING},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the folder of the checkpoint; where another one is used now, only its best is remembered.

        A callback that was never set up takes the folder over: the caller's own, once its workers are done.
        """
        self.dirpath = self.dirpath or state_dict["dirpath"]
        if "scores" not in state_dict:
            self._load_lightning(state_dict)
            return
        kept = Kept(**{name: state_dict[name] for name in Kept().state_dict()})
        self._saved_at = state_dict["saved_at"]
        moved = state_dict["dirpath"] != self.dirpath and kept.best not in self._names
        self._elsewhere = state_dict["best_model_path"] if moved else ""
        self._kept = Kept() if moved else kept
        if not moved:
            # What came later is of the steps that are trained again: the same checkpoints come again in its place.
            self._names &= {*state_dict["names"], *kept.scores, kept.best, kept.newest, kept.spare}

    def _load_lightning(self, state: dict[str, Any]) -> None:
        """Go on from the state that Lightning's ModelCheckpoint left."""
        best = str(state.get("best_model_path") or "")
        folder = Path(self.dirpath or "")
        if state.get("dirpath") != self.dirpath:
            self._elsewhere = best
            return
        scores = {os.path.relpath(path, folder): float(score) for path, score in state.get("best_k_models", {}).items()}
        current = state.get("current_score")
        self._kept = Kept(scores=scores, best=best and os.path.relpath(best, folder), newest="")
        self._kept.score = scores.get(self._kept.best)
        self._kept.current = None if current is None else float(current)


def _score_tensor(score: float) -> torch.Tensor:
    return torch.tensor(score, dtype=torch.float64)


def _look(root: str) -> list[Any]:
    """``[folder, names of the checkpoints in it, why it cannot be written or None]``; makes the folder."""
    folder = Path(root)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}.writable"
        probe.touch()
        probe.unlink()
        names = [str(path.relative_to(folder)) for path in folder.rglob(f"*{EXTENSION}") if path.name != LAST]
    except OSError as error:
        return [root, [], error.strerror or type(error).__name__]
    return [root, names, None]


def _without_fields(template: str) -> str:
    return "".join(part.split("}")[-1] for part in template.split("{"))
