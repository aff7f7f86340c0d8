"""Any world size for algorithms of powers of two: the ranks above the power hand their part to a neighbour.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from drivetrain.comm.schedule import FOLD, UNFOLD, Integers, Messages, Round


class Folding:
    """``power`` of the ranks take part, numbered in their order; ``extra`` are folded in.

    Among the first ``2 * extra`` ranks each even one takes part for itself and the odd one after it.
    """

    def __init__(self, world_size: int) -> None:
        self.n = world_size
        self.power = 1 << (world_size.bit_length() - 1)
        self.extra = world_size - self.power

    def rank(self, participant: Integers) -> Integers:
        """The rank of each participant."""
        return participant + np.minimum(participant, self.extra)

    def participants(self, ranks: Integers) -> Integers:
        """The numbers of those of ``ranks`` that take part."""
        taking = ranks[(ranks >= 2 * self.extra) | (ranks % 2 == 0)]
        return np.where(taking < 2 * self.extra, taking // 2, taking - self.extra)

    def fold(self, chunks: int) -> tuple[Round, ...]:
        """Folded ranks send all ``chunks``, which are added: one round, or none for a power of two."""

        def edges(even: Integers) -> Messages:
            return Messages.of(even + 1, even, 0, "add", chunks)

        sends, receives = self._odd(edges), self._even(edges)
        return (Round(FOLD, 0, self.n, sends, receives),) if self.extra else ()

    def unfold(self, chunk: Callable[[Integers], Integers | int], count: int) -> tuple[Round, ...]:
        """Folded ranks get ``count`` chunks from ``chunk(rank)`` on: one round, or none for a power of two."""

        def edges(even: Integers) -> Messages:
            return Messages.of(even, even + 1, chunk(even + 1), "copy", count)

        sends, receives = self._even(edges), self._odd(edges)
        return (Round(UNFOLD, 0, self.n, sends, receives),) if self.extra else ()

    def _even(self, edges: Callable[[Integers], Messages]) -> Callable[[Integers], Messages]:
        return lambda ranks: edges(ranks[(ranks < 2 * self.extra) & (ranks % 2 == 0)])

    def _odd(self, edges: Callable[[Integers], Messages]) -> Callable[[Integers], Messages]:
        return lambda ranks: edges(ranks[(ranks < 2 * self.extra) & (ranks % 2 == 1)] - 1)
