"""Play a schedule on plain values: every rank in one process, in a fixed order, every message examined. No torch.

Each rank does what its own part of the schedule says and knows nothing else. What it gets must be what it expects: a
message of another phase, step, round, source or chunk is a :class:`ProtocolError` that names both sides. Values are
combined in the order that the schedule states, the receiver's own first, so the bits are those of any other executor.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from drivetrain.comm.arguments import require_op, require_schedule
from drivetrain.comm.callable_module import CallableModule
from drivetrain.comm.schedule import OWNED, REDUCING, Messages, Op, RankRound, Schedule
from drivetrain.errors import ConfigurationError, DrivetrainError

Values = NDArray[Any]
REDUCTIONS: dict[str, Callable[[Values, Values], Values]] = {
    "sum": np.add,
    "average": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


class ProtocolError(DrivetrainError):
    """A rank got a message that it does not expect, or did not get one that it does."""


@dataclass(frozen=True)
class Header:
    """What a message says of itself."""

    phase: str
    step: int
    round: int
    source: int
    destination: int
    chunk: int
    count: int
    op: Op

    def __str__(self) -> str:
        chunks = f"chunk {self.chunk}" if self.count == 1 else f"chunks {self.chunk} to {self.chunk + self.count - 1}"
        place = f"phase {self.phase!r}, step {self.step}, round {self.round}"
        return f"{chunks} from rank {self.source} to rank {self.destination} to {self.op} ({place})"


@dataclass(frozen=True)
class Packet:
    """A message under way: its header and the values of its chunks, one after the other."""

    header: Header
    payload: Values


Channel = Callable[[Packet], Iterable[Packet]]


def faithful(packet: Packet) -> Iterable[Packet]:
    """The channel that delivers every packet once and unchanged."""
    return (packet,)


def simulate(
    schedule: Schedule, values: Sequence[ArrayLike | None], op: str = "sum", channel: Channel = faithful
) -> list[Values | None]:
    """What each rank has after ``schedule``.

    Args:
        schedule: What to play.
        values: By rank, flat. All ranks' contributions, equally long, for kinds that reduce; each rank's own part for
            gather and all_gather, of any length; for broadcast and scatter the root's only. Any numpy type, or Python
            numbers (integers of any size, fractions). Sums and products of booleans and integers are taken in 64 bits.
        op: ``"sum"``, ``"average"``, ``"min"``, ``"max"`` or ``"product"``, for kinds that reduce. The average is the
            sum divided by the number of ranks, of floats for integers.
        channel: What becomes of each packet on its way; a network that loses or alters some, to see it found out.

    Returns:
        By rank: the whole for all_reduce, all_gather and broadcast; for reduce and gather the whole at the root and
        None elsewhere; for reduce_scatter and scatter the rank's own part.

    Raises:
        ConfigurationError: ``schedule`` is none, there is no such ``op``, or ``values`` do not fit the kind.
        ProtocolError: a packet is not what its receiver expects, does not come, or nobody expects it.
    """
    require_schedule(schedule, "simulate")
    require_op("simulate", op)
    ranks = [_Rank(rank, schedule, bounds, held, op) for rank, (bounds, held) in enumerate(_laid_out(schedule, values))]
    if schedule.kind in REDUCING and op not in ("min", "max"):
        for rank in ranks:
            rank.held = _widened(rank.held)
    for number in range(len(schedule.rounds)):
        network: dict[int, deque[Packet]] = defaultdict(deque)
        # Everything is sent before anything is received: the messages of a round carry the values before it.
        for packet in [packet for rank in ranks for packet in rank.send(number)]:
            for arriving in channel(packet):
                network[arriving.header.destination].append(arriving)
        for rank in ranks:
            rank.receive(number, network.pop(rank.rank, deque()))
        for strays in network.values():
            raise ProtocolError(f"{strays[0].header} is for a rank that does not exist.")
    return [rank.result(op) for rank in ranks]


class _Rank:
    """One rank: its part of the schedule and the values it holds."""

    def __init__(self, rank: int, schedule: Schedule, bounds: Sequence[int], held: Values, op: str) -> None:
        self.rank = rank
        self.schedule = schedule
        self.bounds = bounds
        self.held = held
        self.combine = REDUCTIONS[op]
        self.rounds: list[RankRound] = schedule.of_rank(rank)

    def send(self, number: int) -> list[Packet]:
        each = self.rounds[number]
        headers = _headers(each, number, each.sends)
        for header in headers:
            if header.chunk < 0 or header.chunk + header.count > self.schedule.chunks:
                problem = f"rank {self.rank} is to send {header} but has {self.schedule.chunks} chunks"
                raise ProtocolError(f"{problem}; rank {header.destination} waits for it.")
        return [Packet(header, self._chunks(header).copy()) for header in headers]

    def receive(self, number: int, arrived: deque[Packet]) -> None:
        each = self.rounds[number]
        for expected in _headers(each, number, each.receives):
            packet = next((p for p in arrived if p.header == expected), None)
            if packet is None:
                instead = next((p for p in arrived if p.header.source == expected.source), next(iter(arrived), None))
                got = f"rank {instead.header.source} sent {instead.header}" if instead else "nothing came"
                raise ProtocolError(f"rank {self.rank} expects {expected}, but {got}.")
            arrived.remove(packet)
            place = self._chunks(expected)
            if packet.payload.shape != place.shape:
                raise ProtocolError(
                    f"rank {self.rank} expects {place.size} values in {expected}, but rank {expected.source} sent "
                    f"{packet.payload.size}."
                )
            place[...] = self.combine(place, packet.payload) if expected.op == "add" else packet.payload
        if arrived:
            header = arrived[0].header
            raise ProtocolError(f"rank {self.rank} does not expect {header}, but rank {header.source} sent it.")

    def result(self, op: str) -> Values | None:
        kind, whole = self.schedule.kind, self.held
        if kind in ("reduce", "gather") and self.rank != self.schedule.root:
            return None
        if kind in ("reduce_scatter", "scatter"):
            own = self.schedule.chunks // self.schedule.world_size
            whole = whole[self.bounds[self.rank * own] : self.bounds[(self.rank + 1) * own]]
        return whole / self.schedule.world_size if op == "average" and kind in REDUCING else whole

    def _chunks(self, header: Header) -> Values:
        return self.held[self.bounds[header.chunk] : self.bounds[header.chunk + header.count]]


def _headers(each: RankRound, number: int, messages: Messages) -> list[Header]:
    columns = (messages.source, messages.destination, messages.chunk, messages.count, messages.add)
    return [
        Header(each.phase, each.step, number, source, destination, chunk, count, "add" if add else "copy")
        for source, destination, chunk, count, add in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _laid_out(schedule: Schedule, values: Sequence[ArrayLike | None]) -> list[tuple[Sequence[int], Values]]:
    """For each rank where the chunks lie in its buffer, and the buffer."""
    n, chunks, kind = schedule.world_size, schedule.chunks, schedule.kind
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
        raise ConfigurationError(
            f"{kind} over {n} ranks needs a list of values by rank, got a {type(values).__name__}: give one per rank."
        )
    if len(values) != n:
        raise ConfigurationError(f"{kind} over {n} ranks needs as many values, got {len(values)}: give one per rank.")
    if kind in OWNED and chunks % n:
        raise ConfigurationError(f"{kind} over {n} ranks needs as many chunks for each, has {chunks}.")
    needed = range(n) if kind not in ("broadcast", "scatter") else [schedule.root]
    given = {rank: _flat(values[rank], rank) for rank in needed}
    if kind in ("all_gather", "gather"):
        own = chunks // n
        lengths = [
            len(given[c // own]) * (c % own + 1) // own - len(given[c // own]) * (c % own) // own for c in range(chunks)
        ]
        bounds = [0, *accumulate(lengths)]
        dtype = np.result_type(*given.values())
        laid: list[tuple[Sequence[int], Values]] = []
        for rank in range(n):
            held = np.zeros(bounds[-1], dtype)
            held[bounds[rank * own] : bounds[(rank + 1) * own]] = given[rank]
            laid.append((bounds, held))
        return laid
    first = given[needed[0]]
    for rank in needed:
        if given[rank].shape != first.shape or given[rank].dtype != first.dtype:
            raise ConfigurationError(
                f"{kind} needs equal shapes and types, but rank {needed[0]} has {first.dtype}{first.shape} and rank "
                f"{rank} {given[rank].dtype}{given[rank].shape}."
            )
    bounds = [len(first) * chunk // chunks for chunk in range(chunks + 1)]
    return [(bounds, given[rank].copy() if rank in given else np.zeros_like(first)) for rank in range(n)]


def _flat(values: ArrayLike | None, rank: int) -> Values:
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        array = np.empty(())
    if values is None or array.ndim != 1 or array.dtype.kind not in "biufcO":
        raise ConfigurationError(
            f"rank {rank} needs a flat sequence of numbers, got {values!r}: give it a list of them."
        )
    return array


def _widened(values: Values) -> Values:
    kinds = {"b": np.int64, "i": np.int64, "u": np.uint64}
    wide = kinds.get(values.dtype.kind)
    return values if wide is None else values.astype(wide)


sys.modules[__name__].__class__ = CallableModule
