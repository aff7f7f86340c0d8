"""What a ModelCheckpoint is told, under drivetrain's rules and under Lightning's: arguments and which go together."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from drivetrain.errors import ConfigurationError
from drivetrain.local_path import local_path
from drivetrain_plugins.callbacks.checkpoint import Checkpoint
from drivetrain_plugins.callbacks.monitor import check_mode
from drivetrain_plugins.callbacks.on_exception import save_on_exception

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class CheckpointOptions(Checkpoint):
    """Base of both kinds of ModelCheckpoint, whose arguments these are.

    Args:
        dirpath: folder.
        filename: template such as ``"{epoch:02d}-{val_loss:.3f}"``; ``"{epoch}-{step}"`` by default.
        monitor: metric that ranks the checkpoints; None keeps the newest.
        verbose: report each save.
        save_last: whether there is a ``last.ckpt``; ``"link"`` makes it a link.
        save_top_k: how many to keep; -1 for all, 0 for none.
        save_on_exception: save when an exception ends training; no worker waits for another.
        save_weights_only: leave out what only resuming needs.
        mode: ``"min"`` or ``"max"``. NaN is the worst in both.
        auto_insert_metric_name: put ``name=`` before the values in the file name.
        every_n_train_steps, train_time_interval, every_n_epochs: at most one of them; default every epoch.
        save_on_train_epoch_end: force the end of the training epoch (True) or of validation (False).
        enable_version_counter: append ``-v1``, ``-v2``, ... where the name is taken, else write over it.

    Raises:
        ConfigurationError: arguments that exclude each other.
    """

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
        self.dirpath: str | None = None if dirpath is None else ""  # "" is the folder that the script runs in
        if dirpath:
            self.dirpath = os.path.realpath(local_path(dirpath, "dirpath"))
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
        self._fresh()

    def _fresh(self) -> None:
        """Set what is known before any save; called once the arguments are there."""
        raise NotImplementedError

    def _check(self) -> None:
        check_mode("ModelCheckpoint", self.mode)
        for name, least, way in (
            ("save_top_k", -1, "use -1 for all, 0 for none or a number"),
            ("every_n_train_steps", 0, "use 0 or more"),
            ("every_n_epochs", 0, "use 0 or more"),
        ):
            self._need(getattr(self, name) >= least, f"{name}={getattr(self, name)}", way)
        triggers = (self._every_n_train_steps, self._every_n_epochs, self._train_time_interval is not None)
        self._need(
            sum(bool(trigger) for trigger in triggers) <= 1,
            "",
            "every_n_train_steps, train_time_interval and every_n_epochs exclude each other; give one, and use a second"
            " ModelCheckpoint for another",
        )
        self._need(
            self.monitor is not None or self.save_top_k in (-1, 0, 1),
            f"save_top_k={self.save_top_k}",
            "it needs a monitor to rank the checkpoints; without one use -1, 0 or 1",
        )

    @staticmethod
    def _need(condition: bool, given: str, way: str) -> None:
        if not condition:
            raise ConfigurationError(f"ModelCheckpoint({given}): {way}.")

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

    # -- what both do the same ----------------------------------------------------------------------------------
    def _path_on_exception(self, trainer: Trainer) -> str:
        """Where a checkpoint of this moment goes; no other worker is asked."""
        raise NotImplementedError

    def _saved_step(self) -> int:
        """``global_step`` of the last save."""
        raise NotImplementedError

    def _by_step(self, trainer: Trainer) -> bool:
        every = self._every_n_train_steps
        return every > 0 and trainer.global_step % every == 0

    def _by_epoch(self, trainer: Trainer) -> bool:
        every = self._every_n_epochs
        return every > 0 and (trainer.current_epoch + 1) % every == 0

    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
        if not self.save_on_exception or trainer.fast_dev_run or trainer.sanity_checking:
            return
        if self._saved_step() != trainer.global_step:
            save_on_exception(trainer, self._path_on_exception(trainer), exception)

    def _resumed_from(self, trainer: Trainer, path: Path) -> bool:
        """Whether this run began from ``path``, which therefore is not deleted."""
        resumed = trainer.ckpt_path
        return resumed is not None and Path(resumed).absolute() == path.absolute()
