"""OnExceptionCheckpoint: a checkpoint of the moment in which training failed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from drivetrain import checkpoint
from drivetrain.errors import ConfigurationError
from drivetrain.local_path import local_path
from drivetrain_plugins.callbacks.checkpoint import Checkpoint
from drivetrain_plugins.callbacks.on_exception import save_on_exception

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class OnExceptionCheckpoint(Checkpoint):
    """Save the run when an exception ends it; a run that ends in order leaves nothing.

    No rank waits for another, so the job ends as quickly as it would without. Each rank that fails writes what it has,
    as replicas have everything (``single``, ``ddp``, ``ring``); where no rank has everything by itself (shards, stages,
    replicas that train by themselves) nothing is saved and a warning says so.

    Args:
        dirpath: folder of the checkpoint.
        filename: its name without extension.
    """

    FILE_EXTENSION = ".ckpt"

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        if not filename:
            raise ConfigurationError("OnExceptionCheckpoint(filename='') is empty: give the file a name.")
        self.dirpath = local_path(dirpath, "dirpath")
        self.filename = filename

    @property
    def ckpt_path(self) -> str:
        return os.path.join(self.dirpath, self.filename + self.FILE_EXTENSION)

    @property
    def saved_on_exception(self) -> str:  # type: ignore[override]
        return self.ckpt_path

    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
        save_on_exception(trainer, self.ckpt_path, exception)

    def teardown(self, trainer: Trainer, pl_module: TrainModule, *rest: Any, **named: Any) -> None:
        """Remove what an earlier run left: it was taken up or is not needed, for this run ended in order."""
        if trainer.is_global_zero and os.path.exists(self.ckpt_path):
            checkpoint.remove(self.ckpt_path)
