"""Where Lightning's ModelCheckpoint puts its files: their folder, their names, what is free, what is deleted."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain import checkpoint
from drivetrain.errors import CheckpointError
from drivetrain.local_path import local_path
from drivetrain_plugins.callbacks.checkpoint_name import fill, goes_without_version, path_of_first
from drivetrain_plugins.callbacks.checkpoint_options import CheckpointOptions

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer

log = logging.getLogger(__name__)


class CheckpointFiles(CheckpointOptions):
    """The files of Lightning's ModelCheckpoint. By default they lie in the first logger's
    ``save_dir/name/version_N/checkpoints``."""

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1
    handed_back = ("_last_global_step_saved", "_last_checkpoint_saved")  # a further fit does not save a step again

    def _fresh(self) -> None:
        self._last_global_step_saved = 0
        self._last_checkpoint_saved = ""

    def _saved_step(self) -> int:
        return self._last_global_step_saved

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        found = self.dirpath
        if found is None:
            found = local_path(os.path.expandvars(_default_folder(trainer)), "save_dir")
        everyone = trainer.strategy.everyone
        if everyone.world_size > 1:  # the first worker says which folder it is, and what files are called
            found, self.filename = everyone.all_gather_plain([found, self.filename])[0]
        self.dirpath = found
        if stage == "fit" and trainer.is_global_zero and self.save_top_k != 0 and _filled(found):
            warnings.warn(f"the folder of checkpoints {found} is not empty.", stacklevel=2)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        trainer.save_checkpoint(filepath, self.save_weights_only)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if self.verbose and trainer.is_global_zero:
            log.info("epoch %d, step %d: saved %s", trainer.current_epoch, trainer.global_step, filepath)
        for logger in trainer.loggers if trainer.is_global_zero else []:
            logger.after_save_checkpoint(self)

    def format_checkpoint_name(
        self,
        metrics: dict[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Path that a checkpoint with these ``metrics`` (``epoch`` and ``step`` among them) would get; a metric that is
        not there counts as 0."""
        named = self.auto_insert_metric_name
        name = self._format_checkpoint_name(
            filename or self.filename, metrics, prefix=prefix, auto_insert_metric_name=named
        )
        if ver is not None:
            name = self.CHECKPOINT_JOIN_CHAR.join((name, f"v{ver}"))
        return os.path.join(self.dirpath or "", name + self.FILE_EXTENSION)

    def _format_checkpoint_name(
        self,
        filename: str | None,
        metrics: dict[str, Any],
        prefix: str | None = None,
        auto_insert_metric_name: bool = True,
    ) -> str:
        """The name without folder, version and extension, for subclasses that make names of their own; by Lightning's
        name, like all that is called from here and begins with an underscore."""
        join = self.CHECKPOINT_JOIN_CHAR

        def value(name: str) -> Any:
            found = metrics.get(name, 0)
            return found.item() if isinstance(found, Tensor) else found

        def label(name: str) -> str:
            return f"{name}{self.CHECKPOINT_EQUALS_CHAR}" if auto_insert_metric_name else ""

        name = fill(filename or f"{{epoch}}{join}{{step}}", value, label)
        return name if prefix is None else join.join((prefix, name))

    def _get_metric_interpolated_filepath_name(
        self, monitor_candidates: dict[str, Tensor], trainer: Trainer, del_filepath: str | None = None
    ) -> str:
        """The path of a checkpoint that is ranked; ``del_filepath`` is the one that it takes the place of."""
        return self._free_name(trainer, monitor_candidates, None, del_filepath or "")

    def _free_name(self, trainer: Trainer, metrics: dict[str, Tensor], name: str | None, replaced: str) -> str:
        """A path that is not taken, or by what this save replaces; the first worker's, on every worker."""
        path = path_of_first(trainer, self.format_checkpoint_name(metrics, name))
        version = self.STARTING_VERSION
        while self._enable_version_counter and path != replaced and self.file_exists(path, trainer):
            former, path = path, path_of_first(trainer, self.format_checkpoint_name(metrics, name, ver=version))
            if path == former:
                raise goes_without_version(self, path)
            version += 1
        return path

    def file_exists(self, filepath: str | os.PathLike[str], trainer: Trainer) -> bool:
        """Whether the first worker sees a file there, or has begun to write one; every worker must ask."""
        found = trainer.is_global_zero and trainer.checkpoint_io.exists(Path(filepath))
        if trainer.communicator.world_size > 1:
            found = bool(trainer.communicator.all_gather_plain(found)[0])
        return found

    def _remove(self, trainer: Trainer, path: str, current: str) -> None:
        if self._should_remove_checkpoint(trainer, path, current):
            self._remove_checkpoint(trainer, path)

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        """Whether a checkpoint that another took the place of goes: not if it lies elsewhere or the run began from it.
        Every worker asks."""
        target = Path(previous).absolute()
        if previous == current or self._resumed_from(trainer, target):
            return False
        return Path(str(self.dirpath)).absolute() in target.parents

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Called on every worker; the first one deletes."""
        if not trainer.is_global_zero:
            return
        try:
            trainer.checkpoint_io.remove_checkpoint(filepath)
        except (CheckpointError, OSError) as error:
            log.warning("an old checkpoint stays: %s", error)

    @staticmethod
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        """Make ``linkpath`` a link to ``filepath``; the first worker's doing, for which the others don't wait."""
        if trainer.is_global_zero:
            link_to(filepath, linkpath)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """Paths of ``last.ckpt`` and its versions in the folder."""
        folder = Path(_default_folder(trainer) if self.dirpath is None else self.dirpath)
        pattern = re.compile(rf"{re.escape(self.CHECKPOINT_NAME_LAST)}(-\d+)?")
        files = folder.iterdir() if folder.is_dir() else ()
        return {str(file) for file in files if file.suffix == self.FILE_EXTENSION and pattern.match(file.stem)}

    def _path_on_exception(self, trainer: Trainer) -> str:
        return self.format_checkpoint_name(with_counters(trainer, trainer.callback_metrics))


def with_counters(trainer: Trainer, metrics: Mapping[str, Any]) -> dict[str, Any]:
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
    root = trainer.default_root_dir if save_dir is None else save_dir  # "" is the folder that the script runs in
    return os.path.join(root, str(logger.name), version, "checkpoints")


def _filled(folder: str) -> bool:
    return os.path.isdir(folder) and bool(os.listdir(folder))


def link_to(target: str, link: str) -> None:
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
