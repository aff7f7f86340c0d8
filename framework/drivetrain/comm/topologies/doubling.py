"""Recursive doubling: partners at distances 1, 2, 4, ... exchange everything they have.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
"""

from __future__ import annotations

from drivetrain.comm.schedule import EXCHANGE, Integers, Messages, Round, Schedule, require
from drivetrain.comm.topologies.folding import Folding


def recursive_doubling(world_size: int) -> Schedule:
    """All-reduce in ``log2 N`` rounds of the whole tensor: the fewest rounds there can be, for short tensors.

    A world that is not a power of two takes two rounds more, to fold the other ranks in and to tell them the sum. Both
    partners add the same two values, so all ranks end with the same bits wherever addition commutes.

    Raises:
        ConfigurationError: there is no rank.
    """
    require("recursive doubling", world_size, "all_reduce", ("all_reduce",))
    folding = Folding(world_size)

    def exchange(step: int) -> Round:
        def sends(ranks: Integers) -> Messages:
            here = folding.participants(ranks)
            return Messages.of(folding.rank(here), folding.rank(here ^ 1 << step), 0, "add")

        def receives(ranks: Integers) -> Messages:
            here = folding.participants(ranks)
            return Messages.of(folding.rank(here ^ 1 << step), folding.rank(here), 0, "add")

        return Round(EXCHANGE, step, world_size, sends, receives)

    exchanges = tuple(exchange(step) for step in range(folding.power.bit_length() - 1))
    rounds = folding.fold(1) + exchanges + folding.unfold(lambda rank: 0, 1)
    return Schedule("recursive_doubling", world_size, 1, rounds)
