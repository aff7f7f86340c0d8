"""Two binary trees at once: a rank that is inside one is a leaf of the other, so no link is idle.

Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from drivetrain.comm.arguments import require_whole
from drivetrain.comm.schedule import BROADCAST, REDUCE, Integers, Messages, Op, Round, Schedule, require

NONE = -1


def double_tree(world_size: int, segments: int = 16) -> Schedule:
    """All-reduce of each half of the tensor up and down a binary tree of its own, segment after segment.

    About ``4 (segments + log2 N)`` rounds of half a segment-th of the tensor each: no rank sends more than twice the
    tensor, as in a ring, and the number of rounds grows as slowly as a tree's.

    Args:
        world_size: Number of ranks N.
        segments: Pieces of each half that follow each other.

    Raises:
        ConfigurationError: there is no rank or no segment.
    """
    require("double tree", world_size, "all_reduce", ("all_reduce",))
    require_whole("segments", segments, whose=" of a double tree")
    trees = _Trees(world_size, segments)
    length = trees.length
    up = tuple(trees.round(REDUCE, step, step, "add") for step in range(length))
    # Time run backwards: whoever could add one after the other can copy one after the other, through as many ports.
    down = tuple(trees.round(BROADCAST, step, length - 1 - step, "copy") for step in range(length))
    return Schedule("double_tree", world_size, 2 * segments, up + down)


class _Trees:
    """When each rank hands each segment to its parent in each tree, ``(2, world_size)`` arrays.

    Segment i goes up the edge above a rank at time ``start + 2 i``. Both edges on which a rank sends have different
    parities, and so have both on which it receives, so one port is enough.
    """

    def __init__(self, world_size: int, segments: int) -> None:
        self.n = world_size
        self.segments = segments
        self.parent = np.stack(_two_trees(world_size))
        self.children = _children(self.parent)
        self.start = _starts(self.parent, _parities(self.parent))
        last = int(self.start.max()) if world_size > 1 else NONE
        self.length = last + 2 * (segments - 1) + 1 if last >= 0 else 0

    def round(self, phase: str, step: int, time: int, op: Op) -> Round:
        upwards = op == "add"

        def edges(tree: int, child: Integers) -> Messages:
            since = time - self.start[tree, child]
            child = child[(since >= 0) & (since % 2 == 0) & (since // 2 < self.segments)]
            parent = self.parent[tree, child]
            chunk = tree * self.segments + (time - self.start[tree, child]) // 2
            source, destination = (child, parent) if upwards else (parent, child)
            return Messages.of(source, destination, chunk, op)

        def above(ranks: Integers) -> Messages:
            return Messages.join(edges(tree, ranks[self.parent[tree, ranks] != NONE]) for tree in (0, 1))

        def below(ranks: Integers) -> Messages:
            found = (self.children[tree][ranks].ravel() for tree in (0, 1))
            return Messages.join(edges(tree, child[child != NONE]) for tree, child in enumerate(found))

        sends, receives = (above, below) if upwards else (below, above)
        return Round(phase, step, self.n, sends, receives)


def _two_trees(n: int) -> tuple[Integers, Integers]:
    """The parent of each rank in both trees, none for the roots.

    In the first tree odd ranks are leaves. The second is the first of the ranks counted from the other end, or, where
    that would keep them odd, from one further on.
    """
    ranks = np.arange(n)
    low = ranks & -ranks
    parent = (ranks ^ low) | low << 1
    parent = np.where(parent < n, parent, ranks ^ low)
    parent[0] = NONE
    place = n - 1 - ranks if n % 2 == 0 else (ranks - 1) % n
    rank_at = np.argsort(place)
    above = parent[place]
    return parent, np.where(above == NONE, NONE, rank_at[above])


def _children(parent: Integers) -> list[Integers]:
    """For each tree the children of each rank, ``(world_size, 2)``, filled up with none."""
    made = []
    for tree in parent:
        children = np.full((len(tree), 2), NONE)
        for child in np.nonzero(tree != NONE)[0].tolist():
            row = children[tree[child]]
            row[int(row[0] != NONE)] = child
        made.append(children)
    return made


def _parities(parent: Integers) -> Integers:
    """0 or 1 for the edge above each rank in each tree, different for edges with the same sender or receiver.

    Each edge shares its sender with at most one other and its receiver with at most one other, so edges form paths and
    rings, along which parities alternate; rings are even, as senders and receivers alternate too.
    """
    edges = [(tree, child) for tree in (0, 1) for child in np.nonzero(parent[tree] != NONE)[0].tolist()]
    meeting: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for tree, child in edges:
        meeting["sender", child].append((tree, child))
        meeting["receiver", int(parent[tree, child])].append((tree, child))
    parity = np.full(parent.shape, NONE)
    for first in edges:
        if parity[first] != NONE:
            continue
        parity[first], reached = 0, [first]
        while reached:
            tree, child = reached.pop()
            for neighbour in meeting["sender", child] + meeting["receiver", int(parent[tree, child])]:
                if parity[neighbour] == NONE:
                    parity[neighbour] = 1 - parity[tree, child]
                    reached.append(neighbour)
    return parity


def _starts(parent: Integers, parity: Integers) -> Integers:
    """The first time of the right parity at which a rank has its children's first segments."""
    start = np.full(parent.shape, NONE)
    for tree, above in enumerate(parent):
        ready = np.zeros(len(above), np.int64)
        for rank in _leaves_first(above):
            if above[rank] == NONE:
                continue
            start[tree, rank] = ready[rank] + (ready[rank] + parity[tree, rank]) % 2
            ready[above[rank]] = max(ready[above[rank]], start[tree, rank] + 1)
    return start


def _leaves_first(parent: Integers) -> list[int]:
    depth = np.zeros(len(parent), np.int64)
    above = parent.copy()
    while (above != NONE).any():
        depth += above != NONE
        above = np.where(above == NONE, NONE, parent[above])
    return np.argsort(-depth, kind="stable").tolist()
