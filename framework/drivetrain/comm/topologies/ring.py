"""The ring: every rank only ever sends to its right neighbour.

Source: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from drivetrain.comm.arguments import require_whole
from drivetrain.comm.schedule import ALL_GATHER, REDUCE_SCATTER, Integers, Kind, Messages, Op, Round, Schedule, require


def ring(world_size: int, segments: int = 1, kind: Kind = "all_reduce") -> Schedule:
    """The bandwidth-optimal ring: reduce-scatter, then all-gather, in ``2 (N - 1)`` rounds over ``N`` chunks.

    Every rank sends ``2 (N - 1) / N`` of the tensor, which no all-reduce can undercut, and only to its right
    neighbour. A chunk is summed along one fixed path and then copied, so all ranks end with the same bits.

    Args:
        world_size: Number of ranks N.
        segments: Pieces of each chunk that travel one after the other, in ``2 (N - 1) segments`` rounds: a rank can
            add one while the next is arriving.
        kind: ``"all_reduce"``, or one of its halves ``"reduce_scatter"`` and ``"all_gather"``, ``N - 1`` rounds each.

    Raises:
        ConfigurationError: a number is below one, or the ring has no such kind.
    """
    require("ring", world_size, kind, ("all_reduce", "reduce_scatter", "all_gather"))
    require_whole("segments", segments, whose=" of a ring")
    # After N - 1 additions rank r has the sum of chunk r + 1 - ahead. Alone, the scatter must end at chunk r.
    ahead = 1 if kind == "reduce_scatter" else 0
    scatter = _phase(REDUCE_SCATTER, world_size, segments, ahead, "add")
    gather = _phase(ALL_GATHER, world_size, segments, 0 if kind == "all_gather" else -1, "copy")
    rounds = {"all_reduce": scatter + gather, "reduce_scatter": scatter, "all_gather": gather}[kind]
    return Schedule("ring", world_size, world_size * segments, rounds, kind)


def _phase(phase: str, n: int, segments: int, shift: int, op: Op) -> tuple[Round, ...]:
    """In step s rank r sends chunk ``r - shift - s``."""

    def made(number: int) -> Round:
        back = shift + number // segments
        segment = number % segments

        def sends(ranks: Integers) -> Messages:
            return Messages.of(ranks, (ranks + 1) % n, (ranks - back) % n * segments + segment, op)

        def receives(ranks: Integers) -> Messages:
            return Messages.of((ranks - 1) % n, ranks, (ranks - 1 - back) % n * segments + segment, op)

        return Round(phase, number, n, sends, receives)

    return tuple(made(number) for number in range((n - 1) * segments))
