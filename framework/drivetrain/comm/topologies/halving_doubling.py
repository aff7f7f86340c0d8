"""Recursive halving and doubling: partners halve between them what is left to sum, then double back what is summed.

Sources: Rabenseifner, "Optimization of collective reduction operations", 2004; Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drivetrain.comm.schedule import ALL_GATHER, REDUCE_SCATTER, Integers, Kind, Messages, Op, Round, Schedule, require
from drivetrain.comm.topologies.folding import Folding


def halving_doubling(world_size: int, kind: Kind = "all_reduce") -> Schedule:
    """``2 log2 N`` rounds in which a power of two of ranks sends ``2 (N - 1) / N`` of the tensor each: as little as a
    ring in far fewer rounds, but to partners at all distances.

    In the all-reduce the largest messages go to the nearest partner. A world that is not a power of two takes two
    rounds of the whole tensor more, to fold the other ranks in and to tell them the sum.

    Args:
        world_size: Number of ranks N.
        kind: ``"all_reduce"``, or one of its halves, ``"reduce_scatter"`` and ``"all_gather"``.

    Raises:
        ConfigurationError: there is no rank, or no such kind.
    """
    require("halving-doubling", world_size, kind, ("all_reduce", "reduce_scatter", "all_gather"))
    folding = Folding(world_size)
    levels = range(folding.power.bit_length() - 1)
    if kind == "all_reduce":
        butterfly = _Butterfly(folding, bits=list(levels), owned=False)
        rounds = butterfly.halving() + butterfly.doubling()
        rounds = folding.fold(folding.power) + rounds + folding.unfold(lambda rank: 0, folding.power)
        return Schedule("halving_doubling", world_size, folding.power, rounds, kind)
    # Each rank owns its chunk, so blocks are halved in the order of ranks, and a participant's holds two where folded.
    butterfly = _Butterfly(folding, bits=list(reversed(levels)), owned=True)
    if kind == "reduce_scatter":
        rounds = folding.fold(world_size) + butterfly.halving() + folding.unfold(lambda rank: rank, 1)
    else:
        rounds = _join_chunks(folding) + butterfly.doubling() + folding.unfold(lambda rank: 0, world_size)
    return Schedule("halving_doubling", world_size, world_size, rounds, kind)


class _Butterfly:
    """Rounds between participants that differ in one bit.

    Args:
        folding: Who takes part.
        bits: The bit in which partners differ, for each halving.
        owned: Blocks end at the chunk of the rank's own number, among ``world_size`` chunks; else anywhere.
    """

    def __init__(self, folding: Folding, bits: Sequence[int], owned: bool) -> None:
        self.folding = folding
        self.bits = bits
        self.edge = folding.rank if owned else np.asarray

    def halving(self) -> tuple[Round, ...]:
        return tuple(self._round(REDUCE_SCATTER, i, i, "add") for i in range(len(self.bits)))

    def doubling(self) -> tuple[Round, ...]:
        levels = reversed(range(len(self.bits)))
        return tuple(self._round(ALL_GATHER, step, level, "copy") for step, level in enumerate(levels))

    def _round(self, phase: str, step: int, level: int, op: Op) -> Round:
        """Partners of ``level``: in halving each gets the block that it keeps, in doubling the one that it lacks."""
        bit = 1 << self.bits[level]

        def between(source: Integers, destination: Integers) -> Messages:
            start = self._start(destination if op == "add" else source, level + 1)
            chunk, end = self.edge(start), self.edge(start + (self.folding.power >> level + 1))
            return Messages.of(self.folding.rank(source), self.folding.rank(destination), chunk, op, end - chunk)

        def sends(ranks: Integers) -> Messages:
            here = self.folding.participants(ranks)
            return between(here, here ^ bit)

        def receives(ranks: Integers) -> Messages:
            here = self.folding.participants(ranks)
            return between(here ^ bit, here)

        return Round(phase, step, self.folding.n, sends, receives)

    def _start(self, participant: Integers, level: int) -> Integers:
        """Where the block of each participant starts after ``level`` halvings, in chunks of the power of two."""
        halves = ((participant >> bit & 1) * (self.folding.power >> i + 1) for i, bit in enumerate(self.bits[:level]))
        return sum(halves, np.zeros_like(participant))


def _join_chunks(folding: Folding) -> tuple[Round, ...]:
    """Folded ranks hand their own chunk to their neighbours."""

    def edges(odd: Integers) -> Messages:
        return Messages.of(odd, odd - 1, odd, "copy")

    def sends(ranks: Integers) -> Messages:
        return edges(ranks[(ranks < 2 * folding.extra) & (ranks % 2 == 1)])

    def receives(ranks: Integers) -> Messages:
        return edges(ranks[(ranks < 2 * folding.extra) & (ranks % 2 == 0)] + 1)

    return (Round("fold", 0, folding.n, sends, receives),) if folding.extra else ()
