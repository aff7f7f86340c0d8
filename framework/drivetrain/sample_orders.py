"""Which samples a loader reads next: the order of an epoch, and the global batches of it cut for a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from drivetrain.batch_fingerprint import fingerprint
from drivetrain.batch_parts import part
from drivetrain.private_random import PrivateRandom, mix
from drivetrain.strategy import Shard


class EpochOrder:
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
        mixed = (self.seed + self.epoch) % 2**63 if self.as_sampler else mix(self.seed, self.epoch)
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
        source = self.source if self.seed is None else PrivateRandom(self.source, mix(self.seed, self.epoch))
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


class OfRun:
    """A sampler of the project's that is read as it is: it draws the run's numbers, also where a loader's processes
    read ahead. Where it deals out the samples by itself they are the same on all ranks, for each takes its part of one
    order.

    Attributes:
        mark: fingerprint of what it chose first in the epoch: one that deals out nothing chooses the same everywhere.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler_read, self.seed = sampler, seed
        self.epoch, self.mark = 0, 0.0

    def __iter__(self) -> Iterator[Any]:
        return self._noted(iter(PrivateRandom(self.sampler_read, mix(self.seed, self.epoch))))

    def _noted(self, drawn: Iterator[Any]) -> Iterator[Any]:
        for first in drawn:
            self.mark = fingerprint(first)
            yield first
            break
        yield from drawn

    def __len__(self) -> int:
        return len(self.sampler_read)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "sampler_read":
            raise AttributeError(name)
        return getattr(self.sampler_read, name)


class Dealt:
    """The samples of each batch as a DistributedSampler deals them out: rank r has the r-th of every ``size``."""

    def __init__(self, batches: Any, size: int) -> None:
        self.batches, self.size = batches, size

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self.batches:
            listed = list(batch)
            yield [index for rank in range(self.size) for index in listed[rank :: self.size]]

    def __len__(self) -> int:
        return len(self.batches)


class Joined:
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


class Noted:
    """A batch sampler whose choices are kept until they are read."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        self.chosen: dict[int, list[Any]] = {}

    @property
    def sampler(self) -> Any:
        """What chooses the samples, which is told the epoch; None where that is the batch sampler itself."""
        return getattr(self.batches, "sampler", None)

    def __iter__(self) -> Iterator[Any]:
        self.chosen.clear()
        for number, batch in enumerate(self.batches):
            self.chosen[number] = list(batch)
            yield batch

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]
