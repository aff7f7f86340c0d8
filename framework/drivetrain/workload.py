"""Work of known cost for several workers, so that the last one finishes early. No torch here."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

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
    if workers < 1:
        raise ConfigurationError(f"workers={workers}: give the number of workers, at least 1.")
    for item, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ConfigurationError(f"item {item} costs {cost}: give a finite number of at least 0.")
    shares: list[list[int]] = [[] for _ in range(workers)]
    # The number of items comes second, so that items without a cost are spread too.
    least = [(0.0, 0, worker) for worker in range(workers)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, count, worker = least[0]
        shares[worker].append(item)
        heapq.heapreplace(least, (load + costs[item], count + 1, worker))
    return [sorted(share) for share in shares]
