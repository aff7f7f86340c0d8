"""The micro-batches of an epoch, grouped into the windows that share an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from drivetrain.batch_fingerprint import fingerprint, tell_of_alike, tell_of_unlike
from drivetrain.errors import TrainingError
from drivetrain.sharding import BatchSource, MicroBatch

if TYPE_CHECKING:
    from drivetrain.loops.fit import FitLoop


@dataclass(slots=True)
class Window:
    """Micro-batches of one optimizer step and the number of samples in them on all ranks together; None where they are
    read one by one."""

    batches: Sequence[MicroBatch] | Coming
    total: float | None


class Coming:
    """Batches that are read when they are asked for, once: ``count`` of them, or fewer where the epoch ends."""

    def __init__(self, read: Iterator[MicroBatch], count: int) -> None:
        self._read, self._count = read, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[MicroBatch]:
        for micro in islice(self._read, self._count):
            yield micro
            if micro.last:
                return


class Windows:
    """Iterates the windows of ``source`` from batch ``start`` on; the last window of an epoch may be short.

    Ranks that read a stream of unknown length, or batches of their own, agree on each window that there is one for all
    and how many samples it has (one small gather a step): batches of their own end for all with the shortest; ranks
    that read a common stream must see the same.
    """

    def __init__(self, fit: FitLoop, source: BatchSource, start: int, accumulate: int) -> None:
        self.fit, self.source, self.start, self.accumulate = fit, source, start, accumulate
        source.keep_places(0 if accumulate == 1 else 2 * accumulate)
        self.reader = source.read(start)
        self.agrees = (source.uncounted or source.own_stream) and source.shard.size > 1
        one_by_one = source.counted or source.natural
        self.ahead = not fit.same_weight or accumulate == 1 or source.shard.size > 1 or not one_by_one
        self.common = source.stream and not source.own_stream and source.shard.size > 1
        together = fit.strategy.communicator.world_size > source.shard.size
        if (together and not (self.agrees and source.own_stream)) or self.common:
            self.reader = self._looked_at(self.reader)

    def __iter__(self) -> Iterator[Window]:
        return self._ahead() if self.ahead else self._one_by_one()

    def _one_by_one(self) -> Iterator[Window]:
        if self.source.counted:
            length = int(self.source.length)
            for start in range(self.start, length, self.accumulate):
                opening = next(self._timed(), None)
                if opening is None:  # fewer than were said
                    return
                yield Window(Coming(chain([opening], self._timed()), min(self.accumulate, length - start)), None)
            return
        for first in self._timed():
            yield Window(Coming(chain([first], self._timed()), self.accumulate), None)
            if first.last:
                return

    def _timed(self) -> Iterator[MicroBatch]:
        timing = self.fit.timing
        while True:
            clock = perf_counter() if timing.on else 0.0
            micro = next(self.reader, None)
            if timing.on:
                timing.add_sampled("data", clock)
            if micro is None:
                return
            yield micro

    def _ahead(self) -> Iterator[Window]:
        timing, reader, k, agrees = self.fit.timing, self.reader, self.accumulate, self.agrees
        while True:
            clock = perf_counter() if timing.on else 0.0
            first = next(reader, None)
            if first is None:
                batches, total = [], 0.0
            elif k == 1:
                batches, total = [first], first.total
            else:
                batches = [first, *islice(reader, k - 1)]
                total = sum(micro.total for micro in batches)
            if agrees:
                agreed = self._agree(batches, total)
                if agreed is None:
                    return
                total = agreed
            if timing.on:
                timing.add_sampled("data", clock)
            if not batches:
                return
            yield Window(batches, total)

    def _looked_at(self, reader: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """``reader``, of whose first batch in a run ranks that compute each batch together look whether it is one, and
        those that keep parts of it whether they read the same stream."""
        if self.start == 0 and not self.source.compared:
            self.source.compared = True
            first, strategy = next(reader, None), self.fit.strategy
            mark = 0.0 if first is None else fingerprint(first.batch)
            whole = 0.0 if first is None or not self.common else first.whole
            mine = torch.tensor([strategy.data.rank, mark, whole], dtype=torch.float64, device=strategy.device)
            rows = one_of_each([row.tolist() for row in strategy.gather(mine)])
            if strategy.communicator.rank == 0:
                tell_of_unlike([row[1] for row in rows], "trains on")
            if first is not None:
                yield first
        yield from reader

    def _agree(self, batches: list[MicroBatch], total: float) -> float | None:
        """The window's samples on all ranks together, or None when some rank has no batch left. May shorten it."""
        strategy = self.fit.strategy
        sizes = [m.weight if self.source.own_stream else float(m.total) for m in batches]
        sizes += [0.0] * (self.accumulate - len(batches))
        final = float(any(m.last for m in batches))
        looks = self.source.own_stream and self.start == 0 and not self.source.compared
        marks = [fingerprint(batches[0].batch) if batches else 0.0, self.source.chosen_first or 0.0] if looks else []
        mine = torch.tensor([strategy.data.rank, *sizes, final, *marks], dtype=torch.float64, device=strategy.device)
        gathered = one_of_each([t.tolist() for t in strategy.gather(mine)])
        if looks:
            self.source.compared = True
            chosen, read = [row.pop() for row in gathered], [row.pop() for row in gathered]
            if strategy.communicator.rank == 0:
                by_sampler = self.source.chosen_first is not None
                tell_of_alike(chosen if by_sampler else read, by_sampler)
        seen, ends = [row[:-1] for row in gathered], [bool(row[-1]) for row in gathered]
        if self.source.own_stream:
            counts = [sum(size > 0 for size in rank) for rank in seen]
            common = min(counts)
            del batches[common:]
            for number, micro in enumerate(batches):
                micro.even = not self.source.at_once and all(rank[number] == seen[0][number] for rank in seen)
            if batches:  # the epoch ends for all where it does for one: validation and schedulers follow from it
                batches[-1].last = any(end and n == common for end, n in zip(ends, counts, strict=True))
            return sum(sum(rank[:common]) for rank in seen) if common else None
        # One for which the epoch ends goes on to its end, where the others do not meet it.
        if any(one != (seen[0], ends[0]) for one in zip(seen, ends, strict=True)):
            found = ", ".join(
                f"rank {rank}: {int(sum(sizes))} samples{', its last' * end}"
                for rank, (sizes, end) in enumerate(zip(seen, ends, strict=True))
            )
            raise TrainingError(
                f"the ranks read different streams ({found} in the same step): with batch=global every rank must read"
                " the same stream and keeps its part; use batch=per_process for streams that are split by rank."
            )
        return total


def one_of_each(gathered: list[list[float]]) -> list[list[float]]:
    """What each replica said, of rows that begin with its number: ranks that compute each batch together count once.

    Raises:
        TrainingError: two ranks of a replica said something else of their batches.
    """
    found: dict[float, tuple[int, list[float]]] = {}
    for rank, (replica, *row) in enumerate(gathered):
        first, said = found.setdefault(replica, (rank, row))
        if said != row:
            raise TrainingError(
                f"ranks {first} and {rank} compute each batch together and read different ones: let the data set give"
                " its part by trainer.strategy.data.rank, which is the same on both, not by the rank of the process."
            )
    return [row for _, row in found.values()]
