"""A checkpoint is a directory that is complete or absent.

::

    epoch=0-step=63.ckpt/
      manifest.json   what it is, and size and SHA-256 of every other file; written last
      weights/        every tensor of the shared state, in the format of torch.distributed.checkpoint
      state.pt        the plain rest of the shared state; loads with weights_only=True
      rank_0.pt ...   what belongs to one worker: random generators, position in the data, residuals

It is written under a hidden name, flushed to the disk and then renamed into place; see ``replace.py``.
"""

from __future__ import annotations

import os
import pickle
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint import manifest, replace, tensors
from drivetrain.checkpoint.agreement import Communicator, SingleProcess, agree
from drivetrain.checkpoint.convert import from_safe, to_safe
from drivetrain.errors import CheckpointError

STATE = "state.pt"
ATTEMPTS = 5


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds.

    Attributes:
        shared: the state that all workers share, nested as it was saved.
        own: this worker's own part; None when the checkpoint is of another world size, or holds weights only. What is
            then lost (random generators, residuals) starts anew.
        first: the first worker's own part, where the checkpoint is of another world size and has one.
        owns: reads the own parts of all workers that it is of, in the order of ranks; none where it has none.
        meta: the manifest without its list of files: ``kind`` (``"training"`` or ``"weights"``), ``epoch``,
            ``global_step``, ``world_size``, ``strategy``, ``time`` and what else was given to ``save``.
    """

    shared: dict[str, Any]
    own: dict[str, Any] | None
    meta: dict[str, Any]
    first: dict[str, Any] | None = None
    owns: Callable[[], list[dict[str, Any]]] = list


def save(
    path: str | Path,
    shared: dict[str, Any],
    own: dict[str, Any] | None = None,
    *,
    meta: dict[str, Any] | None = None,
    communicator: Communicator | None = None,
    weights_only: bool = False,
) -> Path:
    """Write a checkpoint at ``path``, in the place of one that may be there. All ranks of the job call it together.

    Args:
        path: the directory to make; on a file system that all ranks see. The first rank's counts, where they differ.
        shared: nested dictionaries and lists; leaves are tensors, which every rank holds alike, DTensors, of which each
            rank holds its shards, or anything that ``to_safe`` takes. The plain part is rank 0's.
        own: what belongs to this rank.
        meta: plain data for the manifest, such as ``epoch``, ``global_step`` and ``strategy``.
        communicator: the job's; None for a job of one process. All data is exchanged as plain data through it.
        weights_only: the checkpoint's kind becomes ``"weights"``: it holds no training state, and ``own`` is not kept.

    Returns:
        The first rank's ``path``, on every rank, once the checkpoint is complete.

    Raises:
        CheckpointError: on every rank, when any rank failed. What was at ``path`` before is still there.
    """
    communicator = communicator or SingleProcess()
    with ExitStack() as stack:
        job = _Save(
            Path(path).absolute(),
            shared=shared,
            own=own,
            meta=meta or {},
            communicator=communicator,
            weights_only=weights_only,
            stack=stack,
        )
        value: list[Any] = [None]
        for stage in (job.prepare, job.write, job.publish):
            result, failure = None, None
            try:
                result = stage(value)
            except (
                Exception
            ) as error:  # every kind of failure must reach the agreement, or the other ranks wait for ever
                failure = error
            value = agree(communicator, f"the checkpoint {job.path} was not saved", result, failure)
    return job.path


class _Save:
    """One rank's part in saving. Between two stages the ranks exchange what the stages return."""

    def __init__(
        self,
        path: Path,
        *,
        shared: dict[str, Any],
        own: dict[str, Any] | None,
        meta: dict[str, Any],
        communicator: Communicator,
        weights_only: bool,
        stack: ExitStack,
    ) -> None:
        self.path = path
        self.shared = shared
        self.own = None if weights_only else own
        self.kind = "weights" if weights_only else "training"
        self.meta = meta
        self.rank = communicator.rank
        self.world_size = communicator.world_size
        self.stack = stack
        self.staging: replace.Staging | None = None

    def prepare(self, _: list[Any]) -> dict[str, Any]:
        """Convert everything, so that nothing is written when something cannot be kept; rank 0 makes the directory."""
        found, self.plain = tensors.split(self.shared)
        self.own_plain = None if self.own is None else to_safe(self.own)
        self.writer = tensors.Writer(self.path, found, rank=self.rank)
        plan = self.writer.plan()
        if self.rank != 0:
            return {"plan": plan}
        self.staging = self.stack.enter_context(replace.Staging(self.path))
        (self.staging.folder / tensors.FOLDER).mkdir()
        return {"plan": plan, "path": str(self.path), "folder": str(self.staging.folder)}

    def write(self, prepared: list[Any]) -> dict[str, Any]:
        # A path may hold a time or a process number, of which each rank has its own.
        self.path, folder = Path(prepared[0]["path"]), Path(prepared[0]["folder"])
        if not folder.is_dir():
            raise CheckpointError(
                f"it does not see {folder}, which rank 0 made; save on a file system that all nodes share"
            )
        weights = folder / tensors.FOLDER
        results = self.writer.write(weights, [report["plan"] for report in prepared])
        files = sorted({f"{tensors.FOLDER}/{result[-3]}" for result in results})
        if self.rank == 0:
            _save_plain(self.plain, folder / STATE)
            files.append(STATE)
        if self.own_plain is not None:
            _save_plain(self.own_plain, folder / _own_file(self.rank))
            files.append(_own_file(self.rank))
        return {"results": results, "files": {name: manifest.seal(folder / name) for name in files}}

    def publish(self, written: list[Any]) -> None:
        if self.staging is None:
            return
        folder = self.staging.folder
        self.writer.finish([report["results"] for report in written])
        index = f"{tensors.FOLDER}/{tensors.INDEX}"
        files = {index: manifest.seal(folder / index)}
        for report in written:
            files |= report["files"]
        content = {"epoch": 0, "global_step": 0, "strategy": ""} | self.meta
        content |= {
            "format": manifest.FORMAT,
            "kind": self.kind,
            "world_size": self.world_size,
            "time": time.time(),
            "torch": torch.__version__,
            "files": files,
        }
        manifest.write(folder, content)
        manifest.flush_directory(folder / tensors.FOLDER)
        manifest.flush_directory(folder)
        self.staging.publish()


def load(
    path: str | Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    template: dict[str, Any] | None = None,
    keys: Collection[str] | None = None,
    verify: bool = True,
) -> Loaded:
    """Read the checkpoint at ``path``. No collective: each rank reads for itself.

    Args:
        path: a checkpoint, or a link to one.
        rank: number of this worker.
        world_size: number of workers in the job that loads.
        template: nested like ``shared`` or a part of it; its tensors and DTensors are filled in place, whatever the
            sharding was when saving, and stand in the result too (detached). Tensors without a template come
            whole, on the CPU. A template of another dtype than the stored one gets converted values.
        keys: the top-level keys of ``shared`` to load; None loads all. The rest is not read.
        verify: compare every file with its checksum first. Without it only the sizes are compared.

    Raises:
        CheckpointError: there is no checkpoint, a file of it is damaged (named), or it does not fit ``template``.
    """
    for _ in range(ATTEMPTS):
        folder = replace.locate(Path(path))
        before = _identity(folder)
        try:
            loaded = _load(folder, rank=rank, world_size=world_size, template=template, keys=keys, verify=verify)
        except (CheckpointError, OSError):
            if _identity(replace.locate(Path(path))) == before:
                raise
        else:
            if _identity(replace.locate(Path(path))) == before:
                return loaded
    raise CheckpointError(f"the checkpoint {path} was replaced {ATTEMPTS} times while it was read; load one that stays")


def _load(
    folder: Path,
    *,
    rank: int,
    world_size: int,
    template: dict[str, Any] | None,
    keys: Collection[str] | None,
    verify: bool,
) -> Loaded:
    content = manifest.read(folder)
    manifest.verify(folder, content, checksums=verify)
    files = content.pop("files")
    plain = _load_plain(folder, STATE)
    if keys is not None:
        if missing := set(keys) - plain.keys():
            raise CheckpointError(
                f"the checkpoint {folder} holds no {min(missing)!r}; it holds {', '.join(map(repr, plain))}"
            )
        plain = {key: value for key, value in plain.items() if key in keys}

    targets: dict[str, torch.Tensor | None] = dict.fromkeys(_names(plain))
    if template is not None:
        given, _ = tensors.split(template)
        targets |= given
    allowed = {name.removeprefix(f"{tensors.FOLDER}/") for name in files if name.startswith(f"{tensors.FOLDER}/")}
    values: dict[str, Any] = dict(tensors.read(folder / tensors.FOLDER, targets, allowed=allowed))
    shared = from_safe(plain, tensor=lambda placeholder: values[placeholder["name"]])

    same = content["world_size"] == world_size
    file = _own_file(rank if same else 0)
    found = from_safe(_load_plain(folder, file)) if file in files else None
    identity = _identity(folder)

    def owns() -> list[dict[str, Any]]:
        names = [_own_file(rank) for rank in range(content["world_size"])]
        read = [from_safe(_load_plain(folder, name)) for name in names if name in files]
        if _identity(folder) != identity:
            raise CheckpointError(f"the checkpoint {folder} was replaced while it was read; load one that stays")
        return read

    return Loaded(shared, found if same else None, content, None if same else found, owns)


def outline(path: str | Path) -> dict[str, Any]:
    """What all workers share in the checkpoint at ``path``, with tensors on the meta device: their data is not read.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    folder = replace.locate(Path(path))
    manifest.read(folder)
    stored = tensors.outline(folder / tensors.FOLDER)
    shared: dict[str, Any] = from_safe(_load_plain(folder, STATE), tensor=lambda place: stored[place["name"]])
    return shared


def own_states(path: str | Path) -> list[dict[str, Any]]:
    """What belongs to each worker, in the order of ranks; empty where the checkpoint holds weights only.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    folder = replace.locate(Path(path))
    content = manifest.read(folder)
    manifest.verify(folder, content)
    names = [_own_file(rank) for rank in range(content["world_size"])]
    return [from_safe(_load_plain(folder, name)) for name in names if name in content["files"]]


def _identity(folder: Path) -> tuple[int, int] | None:
    """What tells one checkpoint from the next of the same name: a running job may replace it while it is read."""
    try:
        status = os.stat(folder / manifest.NAME)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _own_file(rank: int) -> str:
    return f"rank_{rank}.pt"


def _names(plain: Any) -> Iterator[str]:
    """The names of the tensors that ``plain`` refers to."""
    if tensors.is_placeholder(plain):
        yield plain["name"]
    elif isinstance(plain, dict):
        for value in plain.values():
            yield from _names(value)
    elif isinstance(plain, (list, tuple)):
        for value in plain:
            yield from _names(value)


def _save_plain(value: Any, file: Path) -> None:
    with open(file, "wb") as stream:  # given a path, torch would write itself and hide why the disk refused
        torch.save(value, stream)


def _load_plain(folder: Path, name: str) -> Any:
    try:
        return torch.load(folder / name, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's own text advises to unpickle it freely: do not pass that on
        asked = re.search(r"GLOBAL (\S+)", str(error))
        what = f"asks for {asked[1]}" if asked else "holds more than plain data"
        raise CheckpointError(
            f"{name} of the checkpoint {folder} {what} and was not written by drivetrain; do not use this checkpoint"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"the checkpoint {folder} cannot be loaded: {name}: {first}; {manifest.ADVICE}"
        ) from error
