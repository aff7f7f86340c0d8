"""Which samples a rank reads. A global batch is split among the replicas; nothing is repeated or dropped.

Global batch ``i`` of ``n`` samples goes to ``size`` replicas in contiguous parts whose sizes differ by at most one.
A batch of fewer samples than replicas goes *whole* to every replica in training (and wherever the strategy needs
every rank in every forward pass), each copy weighing ``1/size``; in evaluation otherwise one sample goes to each of
the first ``n`` replicas and the others sit the batch out.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler
from torch.utils.data import SequentialSampler as InOrder

from drivetrain.errors import ConfigurationError, TrainingError
from drivetrain.private_random import PrivateRandom, restore, states
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
    """

    batch: Any
    index: int
    count: int
    total: int
    copies: int = 1
    loader: int = 0
    last: bool = False
    indices: list[Any] | None = None

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


def batch_size(batch: Any) -> int | None:
    """Samples in a collated batch: the first dimension of its first tensor; None where there is none."""
    if type(batch) in (tuple, list) and batch and type(batch[0]) is torch.Tensor and batch[0].ndim:
        return int(batch[0].shape[0])  # by far the most frequent batch, and this is called at every step
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.ndim else 1
    if isinstance(batch, Mapping):
        parts: Iterable[Any] = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = (getattr(batch, f.name) for f in dataclasses.fields(batch))
    else:
        shape = getattr(batch, "shape", None)  # numpy arrays
        return int(shape[0]) if shape else None
    for item in parts:
        size = batch_size(item)
        if size is not None:
            return size
    return None


def take(batch: Any, total: int, rows: slice) -> Any:
    """``rows`` of a collated batch of ``total`` samples: of every tensor, array and plain list of that length."""
    if isinstance(batch, torch.Tensor) or (hasattr(batch, "shape") and hasattr(batch, "__getitem__")):
        return batch[rows] if batch.ndim and batch.shape[0] == total else batch
    if isinstance(batch, Mapping):
        return {key: take(value, total, rows) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(take(value, total, rows) for value in batch))
    if isinstance(batch, (list, tuple)):
        if len(batch) == total and all(isinstance(item, (str, bytes, int, float, type(None))) for item in batch):
            return batch[rows]
        return type(batch)(take(value, total, rows) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(
            batch, **{f.name: take(getattr(batch, f.name), total, rows) for f in dataclasses.fields(batch)}
        )
    return batch


class ShardedBatches:
    """Batch sampler that yields this rank's indices of every global batch of an epoch, from a position on."""

    def __init__(self, source: Iterable[Any], shard: Shard, whole_tail: bool, seeded: bool, seed: int | None) -> None:
        self.source, self.shard, self.whole_tail, self.seeded = source, shard, whole_tail, seeded
        self.seed = seed  # of the global generators for a sampler that may draw from them
        self.epoch = 0
        self.start = 0
        self.limit: int | None = None
        self.given: Iterable[list[Any]] | None = None  # batches to hand out as they are instead
        self.plan: list[tuple[int, int, int]] = []  # (index of the global batch, its samples, copies) as handed out
        self.chosen: dict[int, list[Any]] = {}  # of what was handed out and is not read yet, by number in the plan

    def __iter__(self) -> Iterator[list[Any]]:
        if self.given is not None:
            for indices in self.given:
                yield [(self.epoch, i) for i in indices] if self.seeded else indices
            return
        self.plan.clear()
        self.chosen.clear()
        source = self.source if self.seed is None else PrivateRandom(self.source, _mix(self.seed, self.epoch))
        for index, batch in enumerate(source):
            if self.limit is not None and index >= self.limit:
                return
            if index < self.start:
                continue
            indices = list(batch)
            rows, copies = part(len(indices), self.shard, self.whole_tail)
            mine = indices[rows]
            if mine:
                self.chosen[len(self.plan)] = mine
                self.plan.append((index, len(indices), copies))
                yield [(self.epoch, i) for i in mine] if self.seeded else mine


class _EpochOrder:
    """Sample order of an epoch: a permutation drawn from ``(seed, epoch)``, or the natural one."""

    def __init__(
        self, length: int, seed: int, shuffle: bool, replacement: bool, samples: int, as_sampler: bool = False
    ) -> None:
        self.length, self.seed, self.shuffle, self.as_sampler = length, seed, shuffle, as_sampler
        self.replacement, self.samples = replacement, samples
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            yield from range(self.samples)
            return
        # A DistributedSampler of torch adds seed and epoch; otherwise (1, 0) and (0, 1) should be far apart.
        mixed = (self.seed + self.epoch) % 2**63 if self.as_sampler else _mix(self.seed, self.epoch)
        generator = torch.Generator().manual_seed(mixed)
        if self.replacement:
            yield from torch.randint(self.length, (self.samples,), generator=generator).tolist()
            return
        left = self.samples
        while left > 0:
            order = torch.randperm(self.length, generator=generator).tolist()[:left]
            left -= len(order)
            yield from order

    def __len__(self) -> int:
        return self.samples


def _mix(seed: int, epoch: int) -> int:
    """A 63-bit seed in which (1, 0) and (0, 1) are far apart (splitmix64's finaliser)."""
    x = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 1


class _Seeded:
    """A map-style data set in a loader worker: its random draws depend on seed, epoch and sample, not on the worker."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = self._many

    def _seed(self, key: tuple[int, Any]) -> Any:
        epoch, index = key
        number = _mix(_mix(self.seed, epoch), index if isinstance(index, int) else hash(index) & 0xFFFFFFFF)
        torch.manual_seed(number)
        random.seed(number)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(number & 0xFFFFFFFF)
        return index

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        return self.dataset[self._seed(key)]

    def _many(self, keys: list[tuple[int, Any]]) -> Any:
        self._seed(keys[0])
        return self.dataset.__getitems__([index for _, index in keys])

    def __len__(self) -> int:
        return len(self.dataset)


class BatchSource:
    """One loader as this rank reads it.

    Args:
        loader: a torch DataLoader, or any iterable of collated global batches.
        shard: this rank's part.
        mode: ``"global"`` (the loader's batch is split) or ``"per_process"`` (every replica gets a batch of that
            size; a stream is read by each rank as its own).
        seed: of the shuffle; combined with the epoch.
        training: training shuffles anew every epoch and gives whole tails to every replica.
        limit: batches to read: a number, a fraction, or None for all.
        in_order: read a shuffled loader in the order of its data set (overfitting).
        order: where a shuffle comes from, see :class:`drivetrain.meanings.Meanings`.
        natural: whether reading may draw from the global generators, where ``order`` does not say it.
        own: whether what ``loader`` gives is this rank's already.
        numbers: whether the samples' numbers in the data set are asked for (prediction).
    """

    def __init__(
        self,
        loader: Any,
        shard: Shard,
        *,
        mode: str,
        seed: int,
        training: bool,
        limit: int | float | None = None,
        index: int = 0,
        reshard: bool = True,
        in_order: bool = False,
        order: str = "seed",
        natural: bool | None = None,
        own: bool = False,
        numbers: bool = False,
    ) -> None:
        self.in_order = in_order
        # Lightning tells samplers only: a batch sampler's order stays what it was unless the project tells it itself.
        self._tells_all = order != "torch"
        # As in a loop by hand: the loader draws from the global generators, at the moments at which it is read.
        self.natural = order == "torch" and shard.size == 1 if natural is None else natural
        if self.natural and in_order:
            loader = _in_order(loader)
        self._noted: _Noted | None = None
        if self.natural and numbers and type(loader) is DataLoader and loader.batch_sampler is not None:
            self._noted = _Noted(loader.batch_sampler)
            loader = DataLoader(
                loader.dataset, batch_sampler=self._noted, generator=loader.generator, **_reading_options(loader)
            )
        self._as_sampler = order == "torch" and shard.size > 1
        self._opened: Iterator[Any] | None = None
        self._drawn_from: list[list[Any]] = []  # the generators when the epoch was opened, and at its first batch
        self._resumed_from: list[list[Any]] = []
        self.loader, self.shard, self.mode, self.training, self.index = loader, shard, mode, training, index
        self.seed = seed
        self.whole_tail = training or shard.lockstep
        self.epoch = 0
        self._sampler: ShardedBatches | None = None
        self._order: _EpochOrder | None = None
        self.reader: Any = loader
        self.stream = True
        self._batches: Any = loader
        if not hasattr(loader, "__iter__"):
            raise ConfigurationError(
                f"a loader must be iterable, this one is a {type(loader).__name__}: return a DataLoader or a list"
                " of batches."
            )
        if (
            reshard
            and not self.natural
            and isinstance(loader, DataLoader)
            and type(loader).__iter__ is DataLoader.__iter__
            and not isinstance(loader.dataset, IterableDataset)
            and loader.batch_sampler is not None
        ):
            self._rebuild(loader, seed)
        self.compared = False  # whether ranks looked if they read the same
        self.own_stream = not self._sampler and (own or mode == "per_process" or not reshard) and shard.size > 1
        self.full_length = self._length()
        self.length = _limited(self.full_length, limit)
        self.uncounted = self.full_length == float("inf")  # on any rank

    def _rebuild(self, loader: DataLoader[Any], seed: int) -> None:
        """A loader over the same data set whose batch sampler is ours."""
        self.stream = False
        batches: Any = loader.batch_sampler
        sampler = getattr(batches, "sampler", None)
        factor = self.shard.size if self.mode == "per_process" else 1
        dataset: Any = loader.dataset
        source: Iterable[Any]
        if type(batches) is BatchSampler and isinstance(sampler, (RandomSampler, InOrder, DistributedSampler)):
            drawn = sampler if isinstance(sampler, RandomSampler) else None
            shuffle = sampler.shuffle if isinstance(sampler, DistributedSampler) else drawn is not None
            shuffle = shuffle and not self.in_order
            own = getattr(sampler, "generator", None)
            self._order = _EpochOrder(
                len(dataset),
                seed if own is None else own.initial_seed(),
                shuffle,
                drawn is not None and drawn.replacement,
                len(dataset) if drawn is None else drawn.num_samples,
                self._as_sampler,
            )
            source = BatchSampler(self._order, batches.batch_size * factor, batches.drop_last)
        else:
            source = batches if factor == 1 else _Joined(batches, factor)
        if self._as_sampler and self.mode == "per_process":
            source = _Dealt(source, self.shard.size)
        self._batches = source
        seeded = loader.num_workers > 0
        foreign = seed if self._order is None else None
        self._sampler = ShardedBatches(source, self.shard, self.whole_tail, seeded, foreign)
        options = _reading_options(loader)
        # Its own generator: making an iterator draws a seed, which must not come from the run's random numbers.
        generator = torch.Generator().manual_seed(_mix(seed, 2**31))
        if seeded:
            dataset = _Seeded(dataset, seed)
        self.reader = DataLoader(dataset, batch_sampler=self._sampler, generator=generator, **options)

    def _length(self) -> int | float:
        counted = self._batches if self._sampler is not None else self.loader
        try:
            return len(counted)
        except (TypeError, NotImplementedError):
            return float("inf")

    def agree_on_length(self, lengths: list[list[int | float]]) -> None:
        """Learn ``[full_length, length]`` of every rank: all read as many batches as the shortest has.

        Streams without a length end together too: see :mod:`drivetrain.loops.windows`.

        Raises:
            ConfigurationError: ranks that share their batches have different numbers of them.
        """
        if self.own_stream:
            self.uncounted = any(full == float("inf") for full, _ in lengths)
            self.length = self.length if self.uncounted else min(length for _, length in lengths)
        elif any(one != lengths[0] for one in lengths):
            raise ConfigurationError(
                f"the ranks' loaders have {', '.join(str(n) for _, n in lengths)} batches: with batch=global every rank"
                " must get the same data and keeps its part; use batch=per_process and use_distributed_sampler=False"
                " for data that is split by rank."
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is read; also tells the user's own samplers."""
        self.epoch = epoch
        if self._order is not None:
            self._order.epoch = epoch
        if self._sampler is not None:
            self._sampler.epoch = epoch
        batches = getattr(self.loader, "batch_sampler", None)
        owners: list[Any] = [getattr(self.loader, "sampler", None), getattr(batches, "sampler", None)]
        if self._tells_all:
            owners += [self.loader, batches]
        for owner in {id(owner): owner for owner in owners}.values():
            if callable(getattr(owner, "set_epoch", None)):
                owner.set_epoch(epoch)

    def sizes(self) -> list[int] | None:
        """Samples of each global batch of the epoch where they are known without reading (our own order)."""
        if self._order is None:
            return None
        batches = self._batches.batches if isinstance(self._batches, _Dealt) else self._batches
        size, drop = batches.batch_size, batches.drop_last
        whole, rest = divmod(len(self._order), size)
        return ([size] * whole + ([rest] if rest and not drop else []))[: _as_slice(self.length)]

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.read()

    def read(self, start: int = 0) -> Iterator[MicroBatch]:
        """The epoch's batches from number ``start`` on.

        A stream is read again from its beginning, with the random numbers that it had the first time.
        """
        if self.length == 0:
            return iter(())
        if self._sampler is not None:
            return self._read_sampled(start)
        if self.natural:
            return self._read_natural(start)
        numbered = enumerate(self._repeatable())
        for _ in range(start):
            next(numbered, None)
        if self.full_length != float("inf"):
            return self._read_sized(numbered, start)
        return self._read_unsized(numbered, next(numbered, None))

    # -- in the natural order -----------------------------------------------------------------------------------
    def open(self, keep: bool = True, anew: bool = False) -> None:
        """Make the iterator of the epoch that is read next, which draws from the generators now. Nothing to do where
        the order is our own. Lightning does not ``keep`` that of a loader that it asked for anew. ``anew``: also where
        there is one already."""
        if self.natural and (anew or self._opened is None) and self.length != 0:
            self._drawn_from = [states()]
            opened = iter(self.reader)
            self._opened = opened if keep else None

    def _read_natural(self, start: int) -> Iterator[MicroBatch]:
        if start and self._resumed_from:  # as the epoch was opened and begun before
            restore(self._resumed_from[0])
            self._opened = None
            self.open()
            restore(self._resumed_from[-1])
        self.open()
        opened, self._opened = self._opened, None
        assert opened is not None
        self._drawn_from.append(states())
        numbered = enumerate(opened)
        for _ in range(start):
            next(numbered, None)
        if self.full_length != float("inf") and self.counted:
            return self._read_sized(numbered, start)
        return self._read_unsized(numbered, next(numbered, None))

    def state_dict(self) -> dict[str, Any]:
        """What the order of the epoch at hand comes from, where that is not the seed."""
        return {"drawn_from": self._drawn_from} if self.natural else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed_from = state.get("drawn_from", [])

    @property
    def given(self) -> Any:
        """What this source was made of, as the project gave it."""
        combined = getattr(self.loader, "combined", None)
        return self.loader if combined is None else combined.iterables

    @property
    def counted(self) -> bool:
        """Whether there are ``length`` batches for certain; what a stream says of its length is a guess."""
        stream = isinstance(getattr(self.loader, "dataset", None), IterableDataset)
        return self.length != float("inf") and not (self.natural and stream)

    @property
    def plain(self) -> bool:
        """Whether it is a data set with a length, read in order or shuffled, in batches of one size."""
        order = self._order
        return order is not None and not order.replacement and order.samples == order.length

    @property
    def shuffled(self) -> bool:
        """Whether our own order is a permutation drawn for each epoch."""
        return self._order is not None and self._order.shuffle

    def read_samples(self, batches: Iterable[list[int]]) -> Iterator[Any]:
        """Collated batches of just these samples, for this rank alone, by the loader's own workers (a client's data in
        federated training). For ``plain`` sources."""
        assert self._sampler is not None
        self._sampler.given = batches
        try:
            yield from self.reader
        finally:
            self._sampler.given = None

    def _repeatable(self) -> Iterable[Any]:
        if isinstance(self.reader, (list, tuple)):
            return self.reader
        reader_seed = _mix(_mix(self.seed, self.epoch), 2 * self.index + self.training)
        seed = _mix(reader_seed, self.shard.rank if self.own_stream else 0)
        return PrivateRandom(self.reader, seed, opening=getattr(self.reader, "num_workers", 0) > 0)

    def _read_sampled(self, start: int) -> Iterator[MicroBatch]:
        sampler = self._sampler
        assert sampler is not None
        sampler.start, sampler.limit = start, _as_slice(self.length)
        final = self.length - 1
        handed = 0
        for handed, batch in enumerate(self.reader, start=1):
            index, total, copies = sampler.plan[handed - 1]
            rows, _ = part(total, self.shard, self.whole_tail)
            chosen = sampler.chosen.pop(handed - 1)
            yield MicroBatch(batch, index, rows.stop - rows.start, total, copies, self.index, index == final, chosen)
        if handed < self._expected(start):
            raise TrainingError(
                f"the loader ended after {handed} of {self._expected(start)} batches in epoch {self.epoch}: its data"
                " set raised StopIteration or its sampler is shorter than it says."
            )

    def _expected(self, start: int) -> int:
        """Batches that this rank gets from ``start`` on."""
        if self.length == float("inf"):
            return 0
        if self.whole_tail or self.shard.size == 1:
            return max(0, int(self.length) - start)
        sizes = self.sizes()
        if sizes is None:
            return 0
        return sum(size > self.shard.rank for size in sizes[start:])

    def _own(self, index: int, batch: Any, last: bool) -> MicroBatch | None:
        """This rank's part of a stream's batch; None where it has none."""
        total = batch_size(batch) or 1
        if self.shard.size == 1 or self.own_stream:
            chosen = None if self._noted is None else self._noted.chosen.pop(index, None)
            return MicroBatch(batch, index, total, total, 1, self.index, last, chosen)
        rows, copies = part(total, self.shard, self.whole_tail)
        if rows.start == rows.stop:
            return None
        mine = batch if copies > 1 else take(batch, total, rows)
        return MicroBatch(mine, index, rows.stop - rows.start, total, copies, self.index, last)

    def _read_sized(self, numbered: Iterator[tuple[int, Any]], start: int) -> Iterator[MicroBatch]:
        final, index = int(self.length) - 1, start - 1
        for index, batch in numbered:
            item = self._own(index, batch, index == final)
            if item is not None:
                yield item
            if index >= final:
                return
        if index < final:
            raise TrainingError(
                f"the loader ended after {index + 1} of {final + 1} batches in epoch {self.epoch}: it is shorter than"
                " its len() says."
            )

    def _read_unsized(self, numbered: Iterator[tuple[int, Any]], ahead: tuple[int, Any] | None) -> Iterator[MicroBatch]:
        """One batch ahead, because which one is the last shows only when the next is not there."""
        final = self.length - 1
        while ahead is not None and ahead[0] <= final:
            (index, batch), ahead = ahead, next(numbered, None) if ahead[0] < final else None
            item = self._own(index, batch, ahead is None)
            if item is not None:
                yield item


class _Dealt:
    """The samples of each batch as a DistributedSampler deals them out: rank r has the r-th of every ``size``."""

    def __init__(self, batches: Any, size: int) -> None:
        self.batches, self.size = batches, size

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self.batches:
            listed = list(batch)
            yield [index for rank in range(self.size) for index in listed[rank :: self.size]]

    def __len__(self) -> int:
        return len(self.batches)


class _Noted:
    """A batch sampler whose choices are kept until they are read."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        self.chosen: dict[int, list[Any]] = {}

    def __iter__(self) -> Iterator[Any]:
        self.chosen.clear()
        for number, batch in enumerate(self.batches):
            self.chosen[number] = list(batch)
            yield batch

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


class _Joined:
    """``factor`` consecutive batches of a sampler as one global batch."""

    def __init__(self, batches: Any, factor: int) -> None:
        self.batches, self.factor = batches, factor

    def __iter__(self) -> Iterator[list[Any]]:
        joined: list[Any] = []
        for number, batch in enumerate(self.batches, start=1):
            joined.extend(batch)
            if number % self.factor == 0:
                yield joined
                joined = []
        if joined:
            yield joined

    def __len__(self) -> int:
        return (len(self.batches) + self.factor - 1) // self.factor


def _in_order(loader: Any) -> Any:
    """A shuffled loader over its data set in order."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return loader
    if isinstance(loader.sampler, InOrder):
        return loader
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        generator=loader.generator,
        **_reading_options(loader),
    )


def _reading_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a loader reads, whatever it reads: for another one over the same data set."""
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "persistent_workers": loader.persistent_workers,
    }
    if loader.num_workers > 0:
        options["prefetch_factor"] = loader.prefetch_factor
    return options


def _limited(length: int | float, limit: int | float | None) -> int | float:
    if limit is None:
        return length
    if isinstance(limit, float):
        if length == float("inf"):
            return length if limit == 1.0 else 0 if limit == 0.0 else _no_fraction(limit)
        batches = int(length * limit)
        if batches == 0 and limit > 0 and length > 0:
            raise ConfigurationError(
                f"a limit of {limit} of the {int(length)} batches of a loader leaves none: give a number of batches, or"
                f" {1 / length:.3g} or more."
            )
        return batches
    return min(length, limit)


def _no_fraction(limit: float) -> int:
    raise ConfigurationError(
        f"a limit of {limit} (a fraction) needs a loader that has a length, this one is a stream: give a number of"
        " batches."
    )


def _as_slice(length: int | float) -> int | None:
    return None if length == float("inf") else int(length)
