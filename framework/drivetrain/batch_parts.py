"""A rank's part of a global batch: which samples it takes, and how they are cut out of what a loader collated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from drivetrain.errors import TrainingError
from drivetrain.strategy import Shard


@dataclasses.dataclass(slots=True)
class MicroBatch:
    """One loader batch as a rank sees it.

    Attributes:
        batch: this rank's part.
        index: number of the batch in its epoch and loader.
        count: samples in ``batch``.
        total: samples in the global batch.
        copies: replicas that hold the same samples (1, or the number of replicas for a whole tail).
        loader: number of the loader among several.
        last: whether it is the loader's last batch of the epoch.
        indices: numbers of the samples in the data set where a sampler chose them, else None.
        even: whether every replica is known to have as many samples of it. All ranks know the same.
        whole: fingerprint of the global batch, of an epoch's first that a stream gives whole; else 0.
        rows: what ``batch`` weighs in means that are logged where that is not ``count``: a project may collate several
            rows of each sample, by which Lightning weighs.
    """

    batch: Any
    index: int
    count: int
    total: int
    copies: int = 1
    loader: int = 0
    last: bool = False
    indices: list[Any] | None = None
    even: bool = False
    whole: float = 0.0
    rows: int | None = None

    @property
    def logged(self) -> float:
        """What a value that is logged with this batch weighs."""
        return (self.count if self.rows is None else self.rows) / self.copies

    @property
    def weight(self) -> float:
        """Samples that this rank stands for; the weights of all ranks sum to ``total``."""
        return self.count / self.copies


def part(total: int, shard: Shard, whole_tail: bool) -> tuple[slice, int]:
    """The slice of ``total`` samples that ``shard`` takes, and how many replicas take the same."""
    if shard.size == 1:
        return slice(0, total), 1
    if total < shard.size and whole_tail:
        return slice(0, total), shard.size
    base, extra = divmod(total, shard.size)
    start = shard.rank * base + min(shard.rank, extra)
    return slice(start, start + base + (shard.rank < extra)), 1


def is_even(total: int, shard: Shard, copies: int) -> bool:
    """Whether :func:`part` gives every replica as many of ``total`` samples."""
    return copies == shard.size or total % shard.size == 0


def batch_size(batch: Any, uncut: bool = False) -> int | None:
    """Samples in a collated batch: the first dimension of its first tensor; None where there is none.

    Args:
        uncut: the batch stays whole, so it may also be an object that :func:`take` cannot cut and only gives its parts
            one by one (a batch of graphs).
    """
    kind = type(batch)
    if (kind is tuple or kind is list) and batch and type(first := batch[0]) is Tensor and (sizes := first.shape):
        return sizes[0]  # by far the most frequent batch, and this is called at every step
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.ndim else 1
    if isinstance(batch, Mapping):
        parts: Iterable[Any] = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = (getattr(batch, f.name) for f in dataclasses.fields(batch))
    elif (shape := getattr(batch, "shape", None)) is not None:  # numpy arrays
        return int(shape[0]) if shape else None
    elif uncut and isinstance(batch, Iterable) and not isinstance(batch, (str, bytes, Iterator)):
        parts = batch  # an iterator is left out: looking into it would use it up
    else:
        return None
    for item in parts:
        size = batch_size(item, uncut)
        if size is not None:
            return size
    return None


def take(batch: Any, total: int, rows: slice) -> Any:
    """``rows`` of a collated batch of ``total`` samples: of every tensor, array and list of samples of that length.
    What else is named (a dict's value, a record's field) all replicas share.

    Raises:
        TrainingError: a list has parts of several lengths, so that it does not show which of them are samples.
    """
    return _take(batch, total, rows, top=True)


def _take(batch: Any, total: int, rows: slice, top: bool = False) -> Any:
    if _is_array(batch):
        return batch[rows] if batch.ndim and batch.shape[0] == total else batch
    if isinstance(batch, Mapping):
        return {key: _take(value, total, rows) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_take(value, total, rows) for value in batch))
    if isinstance(batch, (list, tuple)):
        if _lists_samples(batch, total):
            return batch[rows]
        lengths = {length for item in batch if (length := _length(item, total)) is not None}
        if lengths - {total} or (not top and len(batch) == total and total in lengths):
            raise TrainingError(
                f"a batch of {total} samples, as its first tensor has it, holds a {type(batch).__name__} of"
                f" {len(batch)} with parts of length {', '.join(map(str, sorted(lengths)))}, so it does not show how"
                " to split it among the replicas: let the DataLoader make the batch (batch_size, collate_fn), whose"
                " samples are split before, give what all replicas share in a dict, or use batch=per_process."
            )
        return type(batch)(_take(value, total, rows) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(
            batch, **{f.name: _take(getattr(batch, f.name), total, rows) for f in dataclasses.fields(batch)}
        )
    return batch


def _is_array(item: Any) -> bool:
    return isinstance(item, Tensor) or (hasattr(item, "shape") and hasattr(item, "__getitem__"))


def _lists_samples(batch: Any, total: int) -> bool:
    """Whether a list has one item for each sample: a number, a name, something of a length of its own."""
    if len(batch) != total:
        return False
    lengths = {length for item in batch if (length := _length(item, total)) is not None}
    if lengths:
        return lengths != {total}
    # Lists without a tensor are columns where each is a list of samples: pairs of names, collated.
    return not all(isinstance(item, (list, tuple)) and len(item) == total for item in batch)


def _length(item: Any, total: int) -> int | None:
    """How many parts ``item`` has by its tensors; ``total`` where it lists samples. None where nothing has a length."""
    if _is_array(item):
        return int(item.shape[0]) if item.ndim else None
    if isinstance(item, Mapping):
        parts: Iterable[Any] = item.values()
    elif isinstance(item, (list, tuple)):
        parts = item
        measured = not hasattr(item, "_fields") and any(_length(one, total) is not None for one in item)
        if measured and _lists_samples(item, total):
            return total
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        parts = (getattr(item, field.name) for field in dataclasses.fields(item))
    else:
        return None
    return next((length for part in parts if (length := _length(part, total)) is not None), None)
