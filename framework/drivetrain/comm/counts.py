"""What a schedule costs in rounds and data, counted, and what the literature says it should."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from drivetrain.comm.arguments import require_schedule, require_whole_list
from drivetrain.comm.schedule import Integers, Messages, Schedule
from drivetrain.errors import ConfigurationError


@dataclass(frozen=True)
class Counts:
    """``rounds`` of a schedule, and the largest ``share`` of the tensor that one rank sends, all rounds together."""

    rounds: int
    share: Fraction


class Counter:
    """Adds up messages, round by round."""

    def __init__(self, schedule: Schedule) -> None:
        self.chunks = schedule.chunks
        self.sent = np.zeros(schedule.world_size, np.int64)
        self.rounds = 0

    def add(self, messages: Messages) -> None:
        self.rounds += 1
        np.add.at(self.sent, messages.source, messages.count)

    def counts(self) -> Counts:
        return Counts(self.rounds, Fraction(int(self.sent.max()), self.chunks))


def count(schedule: Schedule) -> Counts:
    """The counts of ``schedule``."""
    require_schedule(schedule, "count")
    counter = Counter(schedule)
    for each in schedule.rounds:
        counter.add(each.messages())
    return counter.counts()


def host_of_ranks(world_size: int, hosts: Sequence[int]) -> Integers:
    """The host of each rank, ``(world_size,)``; ``hosts`` are the numbers of ranks on each, which follow each other.

    Raises:
        ConfigurationError: they are no whole numbers, or do not add up to ``world_size``.
    """
    require_whole_list("hosts", hosts, "[4, 4]")
    if min(hosts, default=0) < 1 or sum(hosts) != world_size:
        raise ConfigurationError(f"hosts={list(hosts)} do not add up to world_size={world_size}: change one.")
    return np.repeat(np.arange(len(hosts)), hosts)


def shares_between_hosts(schedule: Schedule, hosts: Sequence[int]) -> list[Fraction]:
    """The share of the tensor that each rank sends to ranks of other hosts.

    Raises:
        ConfigurationError: ``hosts`` do not add up to the world size.
    """
    return shares_to_other_hosts(schedule, host_of_ranks(schedule.world_size, hosts))


def shares_to_other_hosts(schedule: Schedule, host_of: ArrayLike) -> list[Fraction]:
    """The same, where ``host_of`` is the host of each rank, in whatever order."""
    host = np.asarray(host_of)
    sent = np.zeros(schedule.world_size, np.int64)
    for each in schedule.rounds:
        messages = each.messages()
        crossing = host[messages.source] != host[messages.destination]
        np.add.at(sent, messages.source, messages.count * crossing)
    return [Fraction(chunks, schedule.chunks) for chunks in sent.tolist()]


# -- the literature, for N ranks; sources in the topologies' own files --------------------------------------------
def ring_counts(n: int, segments: int = 1) -> Counts:
    """All-reduce: 2 (N - 1) rounds, 2 (N - 1) / N of the tensor (Patarasu and Yuan, 2009)."""
    return Counts(2 * (n - 1) * segments, Fraction(2 * (n - 1), n))


def half_ring_counts(n: int) -> Counts:
    """Reduce-scatter or all-gather: N - 1 rounds, (N - 1) / N of the tensor."""
    return Counts(n - 1, Fraction(n - 1, n))


def tree_counts(n: int) -> Counts:
    """All-reduce: 2 ceil(log2 N) rounds; the root sends the tensor in every second one."""
    return Counts(2 * _ceil_log2(n), Fraction(_ceil_log2(n)))


def tree_reduce_counts(n: int) -> Counts:
    """ceil(log2 N) rounds; each rank but the root sends the tensor once."""
    return Counts(_ceil_log2(n), Fraction(int(n > 1)))


def tree_broadcast_counts(n: int) -> Counts:
    """ceil(log2 N) rounds; the root sends the tensor in each."""
    return Counts(_ceil_log2(n), Fraction(_ceil_log2(n)))


def tree_gather_counts(n: int) -> Counts:
    """ceil(log2 N) rounds; the root's fullest child sends all below it, for a power of two half of the tensor."""
    below = (min(1 << step, n - (1 << step)) for step in range(_ceil_log2(n)))
    return Counts(_ceil_log2(n), Fraction(max(below, default=0), n))


def tree_scatter_counts(n: int) -> Counts:
    """ceil(log2 N) rounds; the root sends all but its own part, (N - 1) / N."""
    return Counts(_ceil_log2(n), Fraction(n - 1, n))


def chain_counts(n: int, segments: int, passes: int = 1) -> Counts:
    """N - 2 + segments rounds a pass, in which each rank between the ends sends the tensor once."""
    return Counts(passes * (n - 2 + segments), Fraction(min(passes, n - 1))) if n > 1 else Counts(0, Fraction(0))


def recursive_doubling_counts(n: int) -> Counts:
    """log2 N rounds of the whole tensor; else 2 rounds more than the next lower power of two, one of them sent."""
    log, folded = _floor_log2(n), n & n - 1 != 0
    return Counts(log + 2 * folded, Fraction(log + folded))


def halving_doubling_counts(n: int) -> Counts:
    """2 log2 N rounds and 2 (N - 1) / N of the tensor; else 2 rounds more than the next lower power of two P, in one
    of which the whole tensor is sent besides its 2 (P - 1) / P (Rabenseifner, 2004)."""
    power, folded = 1 << _floor_log2(n), n & n - 1 != 0
    return Counts(2 * _floor_log2(n) + 2 * folded, Fraction(2 * (power - 1), power) + folded)


def halving_counts(n: int) -> Counts:
    """Reduce-scatter: log2 N rounds and (N - 1) / N of the tensor; else 2 rounds more than the next lower power of two,
    in one of which a folded rank sends the whole tensor."""
    folded = n & n - 1 != 0
    return Counts(_floor_log2(n) + 2 * folded, Fraction(1) if folded else Fraction(n - 1, n))


def level_counts(levels: Sequence[int]) -> Counts:
    """Hierarchical: 2 (g - 1) rounds for each level of g, and 2 (N - 1) / N of the tensor (Cho and others, 2019)."""
    n = math.prod(levels)
    return Counts(2 * sum(size - 1 for size in levels), Fraction(2 * (n - 1), n))


def hierarchical_counts(hosts: Sequence[int]) -> Counts:
    """2 (g - 1) + 2 (m - 1) rounds for m hosts of at most g ranks. On equal hosts 2 (N - 1) / N of the tensor.

    On unequal ones the smallest host's ranks make the shards. A larger host's ring passes every shard through all of
    its ranks, so each sends all shards but its last one, and those without a shard stay out between hosts.
    """
    shards, m = min(hosts), len(hosts)
    rounds = 2 * (max(hosts) - 1) + 2 * (m - 1)
    across = Fraction(2 * (m - 1), m)
    shares = [
        (2 * shards - (place < shards) - ((place + 1) % size < shards) if size > 1 else 0) + across * (place < shards)
        for size in set(hosts)
        for place in range(size)
    ]
    return Counts(rounds, max(shares) / shards)


def hierarchical_share_between_hosts(ranks: int, hosts: int) -> Fraction:
    """What each of the ``ranks`` of one of ``hosts`` equal hosts sends to other hosts: 2 (m - 1) / m / g."""
    return Fraction(2 * (hosts - 1), hosts * ranks)


def _ceil_log2(n: int) -> int:
    return (n - 1).bit_length()


def _floor_log2(n: int) -> int:
    return n.bit_length() - 1
