"""Work of known cost for several workers, so that the last one finishes early. No torch here."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence

from drivetrain.comm.arguments import number, require_workers
from drivetrain.errors import ConfigurationError


def balance_workload(costs: Sequence[float], workers: int) -> list[list[int]]:
    """Give every item to one of ``workers`` by the rule of the longest processing time first.

    The items go, dearest first, each to the worker that has least so far (the first of several), so the result depends
    on nothing else. The largest sum is at most ``4/3 - 1/(3 workers)`` of the least possible (Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969). Takes ``O(n log n)``.

    Args:
        costs: the cost of each item (seconds, tokens, bytes), at least 0.
        workers: how many there are, all equally fast.

    Returns:
        For each worker the rising indices of its items; empty where there are fewer items than workers.

    Raises:
        ConfigurationError: ``workers`` is below 1, or a cost is negative or not finite.
    """
    require_workers(workers)
    # Python's own numbers, which do not wrap round and do not end at the range of a short type.
    known = [_cost(item, cost) for item, cost in enumerate(costs)]
    shares: list[list[int]] = [[] for _ in range(workers)]
    # The number of items comes second, so that items without a cost are spread too.
    least: list[tuple[float, int, int]] = [(0, 0, worker) for worker in range(workers)]
    for item in sorted(range(len(known)), key=lambda item: (-known[item], item)):
        load, count, worker = least[0]
        shares[worker].append(item)
        heapq.heapreplace(least, (load + known[item], count + 1, worker))
    return [sorted(share) for share in shares]


def _cost(item: int, cost: object) -> float:
    found = number(cost)
    if found is None or not 0 <= found <= sys.float_info.max:
        raise ConfigurationError(f"item {item} costs {cost!r}: give a finite number of at least 0.")
    return found
