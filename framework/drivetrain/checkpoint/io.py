"""Who writes, reads and deletes a checkpoint that is one file. Names and meanings are Lightning's ``CheckpointIO``."""

from __future__ import annotations

import copy
import logging
import os
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint import find, layout, single
from drivetrain.errors import CheckpointError, ConfigurationError

log = logging.getLogger(__name__)


class CheckpointIO(ABC):
    """The first worker writes and deletes, every worker reads. Methods are called with names or by position."""

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint`` at ``path``."""

    @abstractmethod
    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What :meth:`save_checkpoint` wrote at ``path``."""

    @abstractmethod
    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete what is at ``path``."""

    def exists(self, path: str | Path) -> bool:
        """Whether ``path`` is taken, by a file or by what was begun."""
        return os.path.exists(path)

    def teardown(self) -> None:
        """The end of a stage: what was begun is finished, and raises here what it has to raise."""


class TorchCheckpointIO(CheckpointIO):
    """A file of ``torch.save``, complete or absent, see :mod:`drivetrain.checkpoint.single`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise ConfigurationError("save_checkpoint(storage_options=...): checkpoints are local files: leave it out.")
        single.write(checkpoint, path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return single.read(path, weights_only=weights_only, map_location=map_location or "cpu", check=False)

    def remove_checkpoint(self, path: str | Path) -> None:
        target = Path(path)
        if target.is_dir() and not target.is_symlink():
            find.remove(target)
        else:
            target.unlink(missing_ok=True)


class WrappingCheckpointIO(CheckpointIO):
    """Leaves the work to another, by default to :class:`TorchCheckpointIO`; for others to derive from."""

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self.checkpoint_io = TorchCheckpointIO() if checkpoint_io is None else checkpoint_io

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.checkpoint_io.save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(*args, **kwargs)

    def remove_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.checkpoint_io.remove_checkpoint(*args, **kwargs)

    def exists(self, path: str | Path) -> bool:
        return self.checkpoint_io.exists(path)

    def teardown(self) -> None:
        self.checkpoint_io.teardown()


class AsyncCheckpointIO(WrappingCheckpointIO):
    """Writes in a thread while training goes on, from a copy in memory of what is written. One after the other:
    what is deleted was written before. What fails is raised by the next call, or at the end of the stage, which waits
    for all of it."""

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        super().__init__(checkpoint_io)
        self._thread: ThreadPoolExecutor | None = None
        self._begun: list[Future[None]] = []
        self._coming: dict[str, tuple[Future[None], bool]] = {}  # the newest task of each path, and if it is taken then

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        try:  # deeply: training changes what callbacks and modules put in, whatever holds it
            whole = copy.deepcopy(layout.replace_tensors(checkpoint, torch.Tensor.detach))
        except Exception as error:  # whatever a stranger's object raises
            raise CheckpointError(
                f"the checkpoint {path} was not saved: what it holds cannot be copied ({type(error).__name__}:"
                f" {error}); use TorchCheckpointIO, which writes it at once"
            ) from error
        more = {} if storage_options is None else {"storage_options": storage_options}
        self._begin(path, True, self.checkpoint_io.save_checkpoint, whole, path, **more)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._wait()
        return super().load_checkpoint(*args, **kwargs)

    def remove_checkpoint(self, path: str | Path) -> None:
        self._begin(path, False, self._remove, path)

    def exists(self, path: str | Path) -> bool:
        task, taken = self._coming.get(os.path.abspath(path), (None, False))
        return super().exists(path) if task is None or task.done() else taken

    def _remove(self, path: str | Path) -> None:
        try:
            self.checkpoint_io.remove_checkpoint(path)
        except (CheckpointError, OSError) as error:  # nothing is lost by it
            log.warning("an old checkpoint stays: %s", error)

    def teardown(self) -> None:
        try:
            self._wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            super().teardown()

    def _begin(self, path: str | Path, taken: bool, task: Any, *args: Any, **kwargs: Any) -> None:
        done, self._begun = (
            [one for one in self._begun if one.done()],
            [one for one in self._begun if not one.done()],
        )
        for one in done:
            one.result()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        begun = self._thread.submit(task, *args, **kwargs)
        self._begun.append(begun)
        self._coming = {name: one for name, one in self._coming.items() if not one[0].done()}
        self._coming[os.path.abspath(path)] = begun, taken

    def _wait(self) -> None:
        begun, self._begun, self._coming = self._begun, [], {}
        errors = [error for one in begun if (error := one.exception()) is not None]
        if errors:
            raise errors[0]
