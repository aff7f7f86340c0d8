"""Tensors into and out of the files of torch.distributed.checkpoint (DCP), without its pickles and collectives.

DCP's planner, writer and reader do the work: which rank writes which piece, and which pieces make up a tensor that is
sharded otherwise than it was saved. Two things are done here instead: ranks exchange their plans as plain data (DCP
would pickle them across the network), and the index is read by an unpickler that knows only the index's own classes.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from drivetrain.checkpoint.convert import TAG, Key, describe, to_safe
from drivetrain.checkpoint.manifest import ADVICE
from drivetrain.errors import CheckpointError, nearest

FOLDER = "weights"
INDEX = ".metadata"
TENSOR = "tensor"


def split(shared: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
    """Take the tensors out of ``shared``: ``({name: tensor}, plain data with a tagged name in each tensor's place)``.

    A name is the path of keys joined by ``/``: ``state_dict/layer1.weight``, ``optimizer_states/0/state/3/exp_avg``.
    Sparse and quantized tensors, which DCP does not take, stay in the plain data.

    Raises:
        CheckpointError: something in ``shared`` cannot be kept.
    """
    tensors: dict[str, torch.Tensor] = {}

    def take(path: tuple[Key, ...], value: torch.Tensor) -> Any:
        value = value.detach()
        if value.device.type == "meta":
            raise CheckpointError(
                f"cannot keep {describe(path)}: a tensor on the meta device has no data; materialise it first"
            )
        if isinstance(value, DTensor):
            if any(placement.is_partial() for placement in value.placements):
                raise CheckpointError(
                    f"cannot keep {describe(path)}: a partial DTensor is no value yet; redistribute it first"
                )
        elif value.layout is not torch.strided or value.is_quantized:
            return value
        name = "/".join(_segment(key) for key in path)
        if name in tensors:
            raise CheckpointError(
                f"cannot keep {describe(path)}: another tensor has the same name {name!r}; rename a key"
            )
        # A view that is conjugated or negated lazily is written as what it means, not as what lies in memory.
        tensors[name] = value if isinstance(value, DTensor) else value.resolve_conj().resolve_neg()
        return {TAG: TENSOR, "name": name}

    return tensors, to_safe(shared, tensor=take)


def _segment(key: Key) -> str:
    """A key as a part of a name. Text that looks like a number is quoted, so that ``0`` and ``"0"`` stay apart."""
    text = str(key) if type(key) is int else key if isinstance(key, str) else f"<{type(key).__name__}:{key!r}>"
    text = text.replace("%", "%25").replace("/", "%2F")
    return f"'{text}'" if isinstance(key, str) and re.fullmatch(r"-?\d+|'.*'|<.*>", text, re.DOTALL) else text


class Writer:
    """One rank's part in writing ``tensors`` into ``folder``: plan, then write, then (rank 0) the index.

    ``plan()`` gives plain data that every rank needs of every other before ``write``; ``write`` gives plain data that
    rank 0 needs of every rank before ``finish``. Replicated tensors are written once, shared out evenly over the ranks.
    """

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor], *, rank: int) -> None:
        self.rank = rank
        self.tensors = tensors
        self.storage = _QuietWriter(folder, sync_files=False)
        self.planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.metadata: Metadata | None = None
        self.plans: list[SavePlan] = []

    def plan(self) -> list[list[Any]]:
        """What this rank holds: name, kind, dtype, shape, and offsets and sizes of the piece."""
        self.planner.set_up_planner(self.tensors, None, self.rank == 0)
        return [_item_to_plain(item) for item in self.planner.create_local_plan().items]

    def write(self, folder: Path, plans: list[list[list[Any]]]) -> list[list[Any]]:
        """Write this rank's share of what ``plans`` (one a rank) hold; where each piece lies in which file.

        Raises:
            CheckpointError: the ranks do not hold the same tensors.
            OSError: the disk is full or not writable.
        """
        self.storage.reset(folder)
        self._check(plans)
        everything = [SavePlan([_item_from_plain(item) for item in plan]) for plan in plans]
        shared_out, self.metadata = self.planner.create_global_plan(everything)
        self.storage.set_up_storage_writer(self.rank == 0)
        self.plans = self.storage.prepare_global_plan(shared_out)
        mine = self.planner.finish_plan(self.plans[self.rank])
        if not mine.items:
            return []
        results = self.storage.write_data(mine, self.planner).wait()
        return [
            [
                *_index_to_plain(r.index),
                r.size_in_bytes,
                r.storage_data.relative_path,
                r.storage_data.offset,
                r.storage_data.length,
            ]
            for r in results
        ]

    def finish(self, results: list[list[list[Any]]]) -> None:
        """Write the index, from what ``write`` gave on every rank. Rank 0 only."""
        assert self.metadata is not None, "finish() comes after write()"
        self.storage.finish(self.metadata, [[_result_from_plain(r) for r in part] for part in results])

    def _check(self, plans: list[list[list[Any]]]) -> None:
        known: dict[str, tuple[Any, Any]] = {}
        for rank, plan in enumerate(plans):
            for name, _, _, _, _, dtype, size in plan:
                if known.setdefault(name, (dtype, size)) != (dtype, size):
                    raise CheckpointError(
                        f"rank {rank} holds {name!r} as {dtype} {size}, another rank as {known[name]}; "
                        "the ranks must save the same state"
                    )
        if self.rank == 0 and (odd := known.keys() ^ self.tensors.keys()):
            raise CheckpointError(
                f"rank 0 and the other ranks do not save the same tensors ({min(odd)!r} is missing on one side); "
                "every rank must pass the same shared state"
            )


def read(folder: Path, targets: Mapping[str, torch.Tensor | None], *, allowed: set[str]) -> dict[str, torch.Tensor]:
    """Read tensors by name, each whole on the CPU or, where ``targets`` gives a tensor or DTensor, into that one.

    No collective: each rank reads what its own shards need. A tensor is read piece by piece, so that the memory needed
    beyond the result is that of one piece. A target of another dtype gets the values converted to its own.

    Args:
        folder: where the DCP files lie.
        targets: names to read, and where to (None: a new CPU tensor).
        allowed: names of files in ``folder`` that may be read (those that the manifest vouches for).

    Raises:
        CheckpointError: a name is not in the checkpoint, a shape differs, or the index is not one that DCP writes.
    """
    reader = _RestrictedReader(folder)
    metadata = reader.read_metadata()
    state: dict[str, torch.Tensor] = {}
    for name, target in targets.items():
        stored = metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(
                f"the checkpoint {folder.parent} holds no tensor {name!r}; "
                f"{nearest(name, metadata.state_dict_metadata)}"
            )
        if target is None:
            state[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
        elif target.size() != stored.size:
            raise CheckpointError(
                f"{name!r} has shape {list(stored.size)} in the checkpoint {folder.parent} and "
                f"{list(target.size())} in the module; load it into the module that it was saved from"
            )
        else:
            state[name] = target.detach()
    if stray := {info.relative_path for info in metadata.storage_data.values()} - allowed:
        raise CheckpointError(
            f"the index of the checkpoint {folder.parent} refers to {min(stray)!r}, which is not part of it; "
            "do not use this checkpoint"
        )
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    try:
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:  # only where checksums were not compared
        raise CheckpointError(
            f"the tensors of the checkpoint {folder.parent} cannot be read ({type(error).__name__}); {ADVICE}"
        ) from error
    return state


def outline(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that lie in ``folder`` by name, on the meta device."""
    return {
        name: torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
        for name, stored in _RestrictedReader(folder).read_metadata().state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }


def is_placeholder(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and value.get(TAG) == TENSOR


class _QuietWriter(FileSystemWriter):
    """DCP's writer, which would note the absolute path of the folder in the index."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class _RestrictedReader(FileSystemReader):
    """DCP's reader, with an unpickler for the index that cannot be made to run anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / INDEX
        try:
            with open(path, "rb") as stream:
                metadata = _IndexUnpickler(stream).load()
        except CheckpointError as error:
            raise CheckpointError(
                f"the index {path} is not one that torch writes: {error}; do not use this checkpoint"
            ) from error
        except Exception as error:  # a broken pickle raises almost anything
            raise CheckpointError(
                f"the index {path} cannot be read ({type(error).__name__}); use another checkpoint"
            ) from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(
                f"the index {path} holds a {type(metadata).__name__} and no index; do not use this checkpoint"
            )
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    """Admits the classes that make up an index of tensors. No bytes entries: those would be unpickled freely later."""

    _CLASSES = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if name in self._CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(constant := getattr(torch, name, None), torch.dtype):
            return constant
        raise CheckpointError(f"it asks for {module}.{name}")


def _index_to_plain(index: MetadataIndex) -> list[Any]:
    return [index.fqn, None if index.offset is None else list(index.offset), index.index]


def _index_from_plain(name: str, offset: list[int] | None, index: int | None) -> MetadataIndex:
    return MetadataIndex(name, None if offset is None else torch.Size(offset), index)


def _item_to_plain(item: WriteItem) -> list[Any]:
    data = item.tensor_data
    assert data is not None, "only tensors are given to DCP"
    dtype = str(data.properties.dtype).removeprefix("torch.")
    chunk = [list(data.chunk.offsets), list(data.chunk.sizes)]
    return [*_index_to_plain(item.index), item.type.name, chunk, dtype, list(data.size)]


def _item_from_plain(item: list[Any]) -> WriteItem:
    name, offset, index, kind, (offsets, sizes), dtype, size = item
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
        properties=TensorProperties(dtype=getattr(torch, dtype)),
        size=torch.Size(size),
    )
    return WriteItem(_index_from_plain(name, offset, index), WriteItemType[kind], tensor_data=data)


def _result_from_plain(result: list[Any]) -> WriteResult:
    name, offset, index, bytes_written, file, start, length = result
    return WriteResult(_index_from_plain(name, offset, index), bytes_written, _StorageInfo(file, start, length))
