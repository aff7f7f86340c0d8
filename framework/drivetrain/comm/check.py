"""Proof that a schedule does what its kind says, without a tensor or a process, for thousands of ranks in seconds.

The contribution of each rank to each chunk is an independent random 64-bit word, and adding is the wrapping sum of
words. Played on these, a value equals the sum of all words exactly if every contribution is in it once, but for chance:
a value in which some contribution is missing, doubled or of another chunk passes with probability ``2**-64``
(``2**(j-64)`` where every multiplicity is wrong by a multiple of ``2**j``). Where the words differ, the chunk at fault
is played again on exact sets of ranks, which name the place. Chunks never meet, so that is cheap at any size.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drivetrain.comm.arguments import is_whole, require_schedule
from drivetrain.comm.callable_module import CallableModule
from drivetrain.comm.counts import Counter, Counts
from drivetrain.comm.schedule import (
    KINDS,
    OWNED,
    REDUCING,
    ROOTED,
    Integers,
    Messages,
    Round,
    Schedule,
    same_messages,
)
from drivetrain.errors import DrivetrainError

Words = NDArray[np.uint64]
EXAMINED = 32  # chunks, wrong ones first, among which to look for the first wrong addition
ALONE = 256  # ranks times rounds, up to which each rank is asked alone as well; else one rank in each round


class ScheduleError(DrivetrainError):
    """A schedule does not do what its kind says. ``round``, ``rank``, ``chunk`` say where, as far as they apply."""

    def __init__(
        self,
        schedule: Schedule,
        problem: str,
        *,
        round: int | None = None,
        rank: int | None = None,
        chunk: int | None = None,
    ) -> None:
        places = {"round": round, "rank": rank, "chunk": chunk}
        where = ", ".join(f"{name} {value}" for name, value in places.items() if value is not None)
        prefix = f"schedule {schedule.name!r} for {schedule.world_size} ranks"
        super().__init__(f"{prefix}{': ' + where if where else ''}: {problem}")
        self.round = round
        self.rank = rank
        self.chunk = chunk


def check(schedule: Schedule, seed: int = 0) -> Counts:
    """Prove that ``schedule`` does what its kind says, and that its rounds can be run.

    Holds ``world_size * chunks`` words of 64 bits. A wrong value that nobody reads and that is overwritten later does
    no harm and is not an error. Ranks that run a schedule ask for their own part alone; what they get then must be what
    they have among all: looked at for each rank of a small schedule, and for one rank in each round of a large one.

    Args:
        schedule: What to prove.
        seed: Of the random words.

    Returns:
        What was sent, since every message is looked at anyway.

    Raises:
        ScheduleError: the shape is inconsistent; a rank's part is another where it is asked alone; a message names a
            rank or chunk that does not exist, or a rank sends to itself; a rank has more destinations or sources than
            ports, or gets the same chunk twice, in one round; what is sent and what its receiver expects differ; at the
            end a contribution is missing, there twice, or of the wrong chunk where the kind promises the sum or the
            value.
        ConfigurationError: ``schedule`` is none.
    """
    _check_shape(require_schedule(schedule, "check"))
    chance = np.random.default_rng(seed)
    held = chance.integers(2**64, size=(schedule.world_size, schedule.chunks), dtype=np.uint64)
    every = schedule.world_size * len(schedule.rounds) <= ALONE
    final = _target(schedule, held)
    counter = Counter(schedule)
    for number, each in enumerate(schedule.rounds):
        sent, expected = each.messages(), each.expected()
        for messages in (sent, expected):
            _check_columns(schedule, number, messages)
        _check_names(schedule, number, sent)
        arriving = _arrivals(schedule, sent)
        _check_agreement(schedule, number, arriving, _arrivals(schedule, expected))
        for rank in range(schedule.world_size) if every else chance.integers(schedule.world_size, size=1).tolist():
            _check_alone(schedule, number, rank, sent, expected)
        _check_ports(schedule, number, arriving)
        _play(held, arriving)
        counter.add(arriving)
    wrong = _promised(schedule) & (held != final)
    if wrong.any():
        # A wrong addition may be overwritten while its lack elsewhere shows at the end: look at right chunks too, those
        # near a wrong one first.
        bad = wrong.any(axis=0)
        distance = np.abs(np.arange(schedule.chunks) - int(np.argmax(bad)))
        raise _culprit(schedule, np.lexsort((distance, ~bad))[:EXAMINED].tolist())
    return counter.counts()


def owners(schedule: Schedule) -> Integers:
    """The owner of each chunk, ``(chunks,)``."""
    return np.arange(schedule.chunks) * schedule.world_size // schedule.chunks


def _target(schedule: Schedule, held: Words) -> Words:
    """The word that each chunk has where the kind promises it, ``(chunks,)``."""
    if schedule.kind in REDUCING:
        return held.sum(axis=0, dtype=np.uint64)
    origin = owners(schedule) if schedule.kind in ("all_gather", "gather") else schedule.root
    return held[origin, np.arange(schedule.chunks)].copy()


def _promised(schedule: Schedule) -> NDArray[np.bool_]:
    """Where the kind promises a value at the end; broadcasts to ``(world_size, chunks)``."""
    ranks = np.arange(schedule.world_size)[:, None]
    if schedule.kind in ("reduce", "gather"):
        return ranks == schedule.root
    if schedule.kind in ("reduce_scatter", "scatter"):
        return ranks == owners(schedule)
    return np.ones((1, 1), np.bool_)


def _check_shape(schedule: Schedule) -> None:
    for name in ("world_size", "chunks", "ports", "root"):
        if not is_whole(getattr(schedule, name)):
            raise ScheduleError(schedule, f"{name}={getattr(schedule, name)!r} is no whole number.")
    if schedule.world_size < 1 or schedule.chunks < 1 or schedule.ports < 1:
        problem = f"needs a rank, a chunk and a port at least, has {schedule.chunks} chunks and {schedule.ports} ports."
        raise ScheduleError(schedule, problem)
    if schedule.kind not in KINDS:
        raise ScheduleError(schedule, f"there is no kind {schedule.kind!r}; known: {', '.join(KINDS)}.")
    if schedule.kind in OWNED and schedule.chunks % schedule.world_size:
        problem = f"a {schedule.kind} gives every rank as many chunks, but has {schedule.chunks} of them."
        raise ScheduleError(schedule, problem)
    if schedule.kind in ROOTED and not 0 <= schedule.root < schedule.world_size:
        raise ScheduleError(schedule, "there is no such root.", rank=schedule.root)
    steps: dict[str, int] = {}
    if not isinstance(schedule.rounds, Sequence):
        raise ScheduleError(schedule, f"its rounds are a {type(schedule.rounds).__name__}, no sequence of them.")
    for number, each in enumerate(schedule.rounds):
        if not isinstance(each, Round):
            raise ScheduleError(schedule, f"it is a {type(each).__name__}, not a Round.", round=number)
        if each.world_size != schedule.world_size:
            raise ScheduleError(schedule, f"it is for {each.world_size} ranks.", round=number)
        if each.step != steps.setdefault(each.phase, 0):
            problem = f"is step {each.step} of phase {each.phase!r}, but step {steps[each.phase]} is next."
            raise ScheduleError(schedule, problem, round=number)
        steps[each.phase] += 1


def _check_columns(schedule: Schedule, number: int, messages: Messages) -> None:
    if not isinstance(messages, Messages):
        raise ScheduleError(schedule, f"a side gives a {type(messages).__name__}, not Messages.", round=number)
    for name, kind in (
        ("source", "int64"),
        ("destination", "int64"),
        ("chunk", "int64"),
        ("count", "int64"),
        ("add", "bool"),
    ):
        column = getattr(messages, name)
        if not isinstance(column, np.ndarray) or column.dtype != kind or column.shape != messages.source.shape[:1]:
            found = f"{column.dtype}{column.shape}" if isinstance(column, np.ndarray) else type(column).__name__
            problem = f"the column {name!r} of its messages is {found}: an array of {kind} is needed, all equally long."
            raise ScheduleError(schedule, problem, round=number)


def _check_alone(schedule: Schedule, number: int, rank: int, sent: Messages, expected: Messages) -> None:
    """What ``rank`` gets that asks for its own part is what it has among all ranks."""
    each, alone = schedule.rounds[number], np.array([rank], np.int64)
    for verb, own, among in (
        ("sends", each.sends(alone), sent.select(sent.source == rank)),
        ("expects", each.receives(alone), expected.select(expected.destination == rank)),
    ):
        if not same_messages(own, among):
            problem = f"asked alone, the rank {verb} {len(own)} messages, among all ranks {len(among)} or others."
            raise ScheduleError(schedule, problem, round=number, rank=rank)


def _check_names(schedule: Schedule, number: int, sent: Messages) -> None:
    source, destination, n = sent.source, sent.destination, schedule.world_size
    if len(sent) == 0 or (
        _below(source, n)
        and _below(destination, n)
        and _below(sent.chunk, schedule.chunks)
        and _below(sent.count - 1, schedule.chunks)
        and _below(sent.chunk + sent.count - 1, schedule.chunks)
        and not (source == destination).any()
    ):
        return
    strangers = (source < 0) | (source >= n) | (destination < 0) | (destination >= n)
    chunks = schedule.chunks
    # Each by itself too: the sum of two large numbers is a negative one.
    nowhere = (sent.chunk < 0) | (sent.count < 1) | (sent.chunk >= chunks) | (sent.count > chunks)
    nowhere |= sent.chunk + sent.count > chunks
    i = int(np.argmax(strangers | nowhere | (source == destination)))
    rank, chunk = int(source[i]), int(sent.chunk[i])
    if strangers[i]:
        rank = rank if not 0 <= rank < n else int(destination[i])
        raise ScheduleError(schedule, "there is no such rank.", round=number, rank=rank, chunk=chunk)
    if nowhere[i]:
        last = chunk + int(sent.count[i]) - 1
        missing = chunk if not 0 <= chunk < schedule.chunks else last
        raise ScheduleError(schedule, "there is no such chunk.", round=number, rank=rank, chunk=missing)
    raise ScheduleError(schedule, "the rank sends to itself.", round=number, rank=rank, chunk=chunk)


def _below(values: Integers, end: int) -> bool:
    """Whether all are in ``[0, end)``: unsigned, negative numbers are the largest."""
    return int(values.view(np.uint64).max()) < end


def _arrivals(schedule: Schedule, messages: Messages) -> Messages:
    """In the order of destinations and, for each, of chunks."""
    key = messages.destination * schedule.chunks + messages.chunk
    return messages if bool((key[1:] > key[:-1]).all()) else messages.select(np.argsort(key, kind="stable"))


def _check_agreement(schedule: Schedule, number: int, sent: Messages, expected: Messages) -> None:
    """What is sent is what is expected: the same source, destination, chunks and operation in this round."""
    if len(sent) == len(expected):
        differ = (sent.source != expected.source) | (sent.destination != expected.destination)
        differ |= (sent.chunk != expected.chunk) | (sent.count != expected.count) | (sent.add != expected.add)
        if not differ.any():
            return
    a, b = set(_rows(sent)), set(_rows(expected))
    unexpected, unsent = sorted(a - b), sorted(b - a)
    if unexpected:
        source, destination, chunk, count, op = unexpected[0]
        others = [row for row in unsent if row[1] == destination] or unsent
        instead = f"expects {_described(others[0])}" if others else "expects nothing of the kind"
        problem = f"rank {source} sends {_described(unexpected[0])}, but the rank {instead}."
        raise ScheduleError(schedule, problem, round=number, rank=destination, chunk=chunk)
    for source, destination, chunk, count, op in unsent:
        problem = f"expects {_described((source, destination, chunk, count, op))}, which is not sent."
        raise ScheduleError(schedule, problem, round=number, rank=destination, chunk=chunk)
    # Equal as sets: a message is there twice on one side, which the next check names on the sender's.
    if len(expected) > len(sent):
        raise ScheduleError(schedule, "a message is expected twice.", round=number)


Row = tuple[int, int, int, int, str]


def _rows(messages: Messages) -> list[Row]:
    columns = (messages.source, messages.destination, messages.chunk, messages.count)
    ops = np.where(messages.add, "add", "copy")
    return list(zip(*(column.tolist() for column in columns), ops.tolist(), strict=True))


def _described(row: Row) -> str:
    source, destination, chunk, count, op = row
    chunks = f"chunk {chunk}" if count == 1 else f"chunks {chunk} to {chunk + count - 1}"
    return f"{chunks} from rank {source} to rank {destination} to {op}"


def _check_ports(schedule: Schedule, number: int, arriving: Messages) -> None:
    alone = bool((arriving.destination[1:] > arriving.destination[:-1]).all())
    if alone and (len(arriving) == 0 or int(np.bincount(arriving.source).max()) == 1):
        return  # the common case: each rank sends at most one message and gets at most one
    again = (arriving.destination[1:] == arriving.destination[:-1]) & (
        arriving.chunk[:-1] + arriving.count[:-1] > arriving.chunk[1:]
    )
    if again.any():
        i = int(np.argmax(again)) + 1
        rank, chunk = int(arriving.destination[i]), int(arriving.chunk[i])
        raise ScheduleError(schedule, "the chunk arrives twice in one round.", round=number, rank=rank, chunk=chunk)
    for verb, own, peer in (
        ("sends to", arriving.source, arriving.destination),
        ("receives from", arriving.destination, arriving.source),
    ):
        if len(own) == 0 or np.bincount(own).max() <= schedule.ports:
            continue
        pairs = np.unique(own * schedule.world_size + peer)
        degree = np.bincount(pairs // schedule.world_size)
        if degree.max() > schedule.ports:
            rank = int(np.argmax(degree > schedule.ports))
            peers = " and ".join(map(str, np.unique(peer[own == rank])[: schedule.ports + 1]))
            problem = f"the rank {verb} {peers} in one round, through {schedule.ports} port(s)."
            chunk = int(arriving.chunk[own == rank][-1])
            raise ScheduleError(schedule, problem, round=number, rank=rank, chunk=chunk)


def _play(held: Words, arriving: Messages) -> None:
    """One round on the words, in place: everything that is sent is read before anything is written."""
    flat, chunks = held.reshape(-1), held.shape[1]
    start, into = arriving.source * chunks + arriving.chunk, arriving.destination * chunks + arriving.chunk
    add = arriving.add
    if len(arriving) and int(arriving.count.max()) == 1 and bool(add.all()) == bool(add.any()):
        flat[into] = flat[into] + flat[start] if add[0] else flat[start]
        return
    moves = []
    for count in np.unique(arriving.count).tolist():
        for op in (True, False):
            which = (arriving.count == count) & (add == op)
            if which.any():
                along = np.arange(count)
                moves.append((flat[start[which, None] + along], into[which, None] + along, op))
    for words, where, op in moves:
        if op:
            flat[where] += words
        else:
            flat[where] = words


def _culprit(schedule: Schedule, chunks: list[int]) -> ScheduleError:
    """Play ``chunks`` alone, the first of which is wrong at the end, on exact sets of ranks (a bit each; above them a
    bit per undefined value): the first place where an addition counts a contribution twice, else the first rank with a
    wrong value of the first chunk."""
    n = schedule.world_size
    origins = {c: schedule.root if schedule.kind in ("broadcast", "scatter") else schedule.owner(c) for c in chunks}
    held = {
        (rank, chunk): 1 << (rank if schedule.kind in REDUCING or rank == origins[chunk] else n + rank)
        for rank in range(n)
        for chunk in chunks
    }
    examined = np.zeros(schedule.chunks + 1, np.int64)
    examined[chunks] = 1
    before = np.cumsum(examined) - examined  # examined chunks below each
    for number, each in enumerate(schedule.rounds):
        messages = each.messages()
        touching = messages.select(before[messages.chunk] < before[messages.chunk + messages.count])
        sent = [
            (destination, chunk, held[source, chunk], op)
            for source, destination, first, count, op in _rows(touching)
            for chunk in chunks
            if first <= chunk < first + count
        ]
        for destination, chunk, value, op in sent:
            own = held[destination, chunk] if op == "add" else 0
            if own & value:
                problem = f"adding counts the contribution of {_ranks(own & value, n)} twice."
                return ScheduleError(schedule, problem, round=number, rank=destination, chunk=chunk)
            held[destination, chunk] = value | own
    chunk = chunks[0]
    complete = (1 << n) - 1 if schedule.kind in REDUCING else 1 << origins[chunk]
    promised = np.nonzero(np.broadcast_to(_promised(schedule), (n, schedule.chunks))[:, chunk])[0].tolist()
    rank = next(rank for rank in promised if held[rank, chunk] != complete)
    if complete & ~held[rank, chunk]:
        problem = f"the contribution of {_ranks(complete & ~held[rank, chunk], n)} is missing at the end."
    else:
        problem = f"the value of {_ranks(held[rank, chunk] & ~complete, n)} does not belong there at the end."
    return ScheduleError(schedule, problem, rank=rank, chunk=chunk)


def _ranks(bits: int, world_size: int) -> str:
    ranks = sorted({bit % world_size for bit in range(bits.bit_length()) if bits >> bit & 1})
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', ...' if len(ranks) > 8 else ''}"


sys.modules[__name__].__class__ = CallableModule
