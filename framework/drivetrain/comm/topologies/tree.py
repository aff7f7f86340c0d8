"""The binomial tree: in every round twice as many ranks have taken part as before.

Sources: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience",
2007 (the minimum spanning tree algorithms); Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH", 2005.
"""

from __future__ import annotations

from drivetrain.comm.schedule import (
    BROADCAST,
    GATHER,
    REDUCE,
    SCATTER,
    Integers,
    Kind,
    Messages,
    Round,
    Schedule,
    require,
)


def tree(world_size: int, kind: Kind = "all_reduce", root: int = 0) -> Schedule:
    """Along a binomial tree in ``ceil(log2 N)`` rounds; the all-reduce is a reduce and a broadcast, ``2 ceil(log2 N)``.

    Reduce and broadcast send the whole tensor in each message, so they suit short ones. Gather and scatter send to and
    from ``root`` what lies below a rank: all chunks but the root's own cross its links once.

    Args:
        world_size: Number of ranks N.
        kind: ``"all_reduce"``, ``"reduce"``, ``"broadcast"``, ``"gather"`` or ``"scatter"``.
        root: The rank at the root, for an all-reduce too.

    Raises:
        ConfigurationError: there is no such rank or kind.
    """
    require("tree", world_size, kind, ("all_reduce", "reduce", "broadcast", "gather", "scatter"), root)
    whole = kind not in ("gather", "scatter")
    up = _Tree(world_size, root, whole).up({"gather": GATHER}.get(kind, REDUCE))
    down = _Tree(world_size, root, whole).down({"scatter": SCATTER}.get(kind, BROADCAST))
    rounds = {"all_reduce": up + down, "reduce": up, "gather": up, "broadcast": down, "scatter": down}[kind]
    return Schedule("tree", world_size, 1 if whole else world_size, rounds, kind, root)


class _Tree:
    """Ranks counted from the root. Rank ``v`` hangs below ``v`` without its lowest bit, with that many ranks below."""

    def __init__(self, world_size: int, root: int, whole: bool) -> None:
        self.n = world_size
        self.root = root
        self.whole = whole
        self.depth = (world_size - 1).bit_length()

    def up(self, phase: str) -> tuple[Round, ...]:
        """Leaves first."""
        return tuple(self._round(phase, step, 1 << step, upwards=True) for step in range(self.depth))

    def down(self, phase: str) -> tuple[Round, ...]:
        """The root first."""
        bits = (1 << step for step in reversed(range(self.depth)))
        return tuple(self._round(phase, step, bit, upwards=False) for step, bit in enumerate(bits))

    def _round(self, phase: str, step: int, bit: int, *, upwards: bool) -> Round:
        """Ranks whose lowest bit is ``bit`` talk with their parents."""

        def children(ranks: Integers) -> Messages:
            relative = (ranks - self.root) % self.n
            return self._edges(relative[relative % (2 * bit) == bit], bit, upwards)

        def parents(ranks: Integers) -> Messages:
            relative = (ranks - self.root) % self.n
            return self._edges(relative[(relative % (2 * bit) == 0) & (relative + bit < self.n)] + bit, bit, upwards)

        sends, receives = (children, parents) if upwards else (parents, children)
        return Round(phase, step, self.n, sends, receives)

    def _edges(self, child: Integers, bit: int, upwards: bool) -> Messages:
        low, high = (child + self.root) % self.n, (child - bit + self.root) % self.n
        source, destination = (low, high) if upwards else (high, low)
        if self.whole:
            return Messages.of(source, destination, 0, "add" if upwards else "copy")
        below = (child + bit).clip(max=self.n) - child
        # Chunks are numbered by absolute ranks, so what lies below a rank may go over the end.
        first = below.clip(max=self.n - low)
        start = Messages.of(source, destination, low, "copy", first)
        return Messages.join([start, Messages.of(source, destination, 0, "copy", below - first)])
