"""The pipelined chain: a line of ranks along which segments follow each other.

Source: van de Geijn and Watts, "SUMMA: scalable universal matrix multiplication algorithm", 1997 (pipelined broadcast).
"""

from __future__ import annotations

from drivetrain.comm.arguments import require_whole
from drivetrain.comm.schedule import BROADCAST, REDUCE, Integers, Kind, Messages, Round, Schedule, require


def chain(world_size: int, kind: Kind = "broadcast", root: int = 0, segments: int = 8) -> Schedule:
    """Broadcast or reduce in ``N - 2 + segments`` rounds of a segment each: close to the tensor's own time where it is
    long, since every link works all the time.

    Args:
        world_size: Number of ranks N.
        kind: ``"broadcast"``, ``"reduce"``, or ``"all_reduce"``, which is a reduce and a broadcast.
        root: Head of the chain.
        segments: Pieces of the tensor.

    Raises:
        ConfigurationError: there is no such rank or kind, or no segment.
    """
    require("chain", world_size, kind, ("all_reduce", "reduce", "broadcast"), root)
    require_whole("segments", segments, whose=" of a chain")
    steps = range(world_size - 2 + segments if world_size > 1 else 0)
    to_root = tuple(_round(REDUCE, step, world_size, root, segments) for step in steps)
    from_root = tuple(_round(BROADCAST, step, world_size, root, segments) for step in steps)
    rounds = {"all_reduce": to_root + from_root, "reduce": to_root, "broadcast": from_root}[kind]
    return Schedule("chain", world_size, segments, rounds, kind, root)


def _round(phase: str, step: int, n: int, root: int, segments: int) -> Round:
    """The link between ranks ``v`` and ``v + 1``, counted from the root, carries the segment that is ``step`` less the
    links before it."""
    inwards = phase == REDUCE

    def along(link: Integers) -> Messages:
        segment = step - (n - 2 - link if inwards else link)
        link = link[(link >= 0) & (link < n - 1) & (segment >= 0) & (segment < segments)]
        near, far = (link + root) % n, (link + 1 + root) % n
        if inwards:
            return Messages.of(far, near, step - (n - 2 - link), "add")
        return Messages.of(near, far, step - link, "copy")

    def outer(ranks: Integers) -> Messages:
        return along((ranks - root) % n - 1)

    def inner(ranks: Integers) -> Messages:
        return along((ranks - root) % n)

    return Round(phase, step, n, *((outer, inner) if inwards else (inner, outer)))
