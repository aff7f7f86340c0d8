"""Staleness of a run: optimizer steps between the weights that a gradient was computed with and those it was applied
to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def summary(counted: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Of all workers' pushes, over all servers.

    Args:
        counted: of each server the parts of pushes that it took, the sum of their staleness, and the largest.
    """
    parts, total = (sum(one[i] for one in counted) for i in (0, 1))
    return {
        "pushes": parts // len(counted),  # each has a part for every server
        "staleness_mean": total / parts if parts else 0.0,
        "staleness_max": max(one[2] for one in counted),
    }
