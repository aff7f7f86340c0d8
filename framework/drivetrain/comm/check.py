"""Proof that a schedule is an all-reduce, without a tensor or a process.

Each rank's value of each chunk is represented by the set of ranks whose contribution it holds (a bit per rank). Playing
the rounds on these sets shows for any input whether every rank ends with every contribution exactly once.
"""

from __future__ import annotations

from drivetrain.comm.schedule import Round, Schedule, Transfer
from drivetrain.errors import DrivetrainError


class ScheduleError(DrivetrainError):
    """A schedule is not a correct all-reduce. ``round``, ``rank`` and ``chunk`` say where, as far as they apply."""

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


def check(schedule: Schedule) -> None:
    """Prove that ``schedule`` leaves every contribution exactly once on every rank, and that its rounds can be run.

    Holds ``world_size * chunks`` sets of ``world_size`` bits.

    Raises:
        ScheduleError: the shape is inconsistent; a transfer names a rank, chunk or operation that does not exist, or a
            rank sends to itself; a rank has two destinations, two sources or the same chunk twice in one round; an
            addition counts a contribution twice; a contribution is missing at the end.
    """
    _check_shape(schedule)
    held = [[1 << rank] * schedule.chunks for rank in range(schedule.world_size)]
    for number, transfers in enumerate(schedule.rounds):
        _check_ports(schedule, number, transfers)
        # Read everything that is sent before anything is written: the transfers of a round are simultaneous.
        sent = [(transfer, held[transfer.source][transfer.chunk]) for transfer in transfers]
        for transfer, value in sent:
            _receive(schedule, number, transfer, value, held[transfer.destination])
    everyone = (1 << schedule.world_size) - 1
    for rank, chunks in enumerate(held):
        for chunk, value in enumerate(chunks):
            if value != everyone:
                missing = _ranks(everyone & ~value)
                raise ScheduleError(
                    schedule, f"the contribution of {missing} is missing at the end.", rank=rank, chunk=chunk
                )


def _check_shape(schedule: Schedule) -> None:
    if schedule.world_size < 1 or schedule.chunks < 1:
        raise ScheduleError(schedule, f"needs at least one rank and one chunk, has {schedule.chunks} chunks.")
    if len(schedule.phases) != len(schedule.rounds):
        raise ScheduleError(schedule, f"has {len(schedule.rounds)} rounds but {len(schedule.phases)} phase names.")


def _check_ports(schedule: Schedule, number: int, transfers: Round) -> None:
    destination_of: dict[int, int] = {}
    source_of: dict[int, int] = {}
    taken: set[tuple[int, int]] = set()
    for source, destination, chunk, op in transfers:
        for rank in (source, destination):
            if not 0 <= rank < schedule.world_size:
                raise ScheduleError(schedule, "there is no such rank.", round=number, rank=rank, chunk=chunk)
        if not 0 <= chunk < schedule.chunks:
            raise ScheduleError(schedule, "there is no such chunk.", round=number, rank=source, chunk=chunk)
        if op not in ("add", "copy"):
            raise ScheduleError(
                schedule, f"operation {op!r} is neither 'add' nor 'copy'.", round=number, rank=source, chunk=chunk
            )
        if source == destination:
            raise ScheduleError(schedule, "the rank sends to itself.", round=number, rank=source, chunk=chunk)
        if destination_of.setdefault(source, destination) != destination:
            problem = f"the rank sends to {destination_of[source]} and to {destination} in one round."
            raise ScheduleError(schedule, problem, round=number, rank=source, chunk=chunk)
        if source_of.setdefault(destination, source) != source:
            problem = f"the rank receives from {source_of[destination]} and from {source} in one round."
            raise ScheduleError(schedule, problem, round=number, rank=destination, chunk=chunk)
        if (destination, chunk) in taken:
            raise ScheduleError(
                schedule, "the chunk arrives twice in one round.", round=number, rank=destination, chunk=chunk
            )
        taken.add((destination, chunk))


def _receive(schedule: Schedule, number: int, transfer: Transfer, value: int, held: list[int]) -> None:
    chunk = transfer.chunk
    if transfer.op == "copy":
        held[chunk] = value
        return
    twice = held[chunk] & value
    if twice:
        problem = f"adding counts the contribution of {_ranks(twice)} twice."
        raise ScheduleError(schedule, problem, round=number, rank=transfer.destination, chunk=chunk)
    held[chunk] |= value


def _ranks(bits: int) -> str:
    ranks = [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', ...' if len(ranks) > 8 else ''}"
