"""Level by level: what stays inside a host does not burden the links between hosts.

Sources: Cho, Finkler, Serrano, Kung and Hunter, "BlueConnect: decomposing all-reduce for deep learning on heterogeneous
network hierarchy", 2019 (any number of levels); Jia and others, "Highly scalable deep learning training system with
mixed-precision: training ImageNet in four minutes", 2018 (two levels).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drivetrain.comm.arguments import require_whole_list
from drivetrain.comm.schedule import ALL_GATHER, REDUCE_SCATTER, Integers, Messages, Op, Round, Schedule, require
from drivetrain.errors import ConfigurationError


def hierarchical(world_size: int, hosts: Sequence[int] | None = None, levels: Sequence[int] | None = None) -> Schedule:
    """All-reduce by rings inside hosts, between hosts, and inside hosts again.

    Ranks of a host reduce-scatter to one shard each, the ranks with the same shard on all hosts all-reduce it, and the
    host gathers: with m hosts of g ranks a rank sends ``2 (m - 1) / m / g`` of the tensor to another host. In rounds:
    ``2 (g - 1) + 2 (m - 1)``. Where hosts are unequal there are as many shards as the smallest has ranks.

    Args:
        world_size: Number of ranks N; those of a host follow each other.
        hosts: Number of ranks on each host.
        levels: Instead, how many ranks share a host, how many hosts a rack, and so on; their product is N.
            Neither: about as many hosts as ranks on each.

    Raises:
        ConfigurationError: there is no rank, or the numbers do not make up ``world_size``.
    """
    require("hierarchical all-reduce", world_size, "all_reduce", ("all_reduce",))
    if hosts is not None and levels is not None:
        raise ConfigurationError("a hierarchical all-reduce takes hosts or levels, not both: leave one out.")
    if levels is not None:
        require_whole_list("levels", levels, "[4, 2]")
        if min(levels, default=0) < 1 or math.prod(levels) != world_size:
            raise ConfigurationError(f"levels={list(levels)} do not multiply to world_size={world_size}: change one.")
        axes = _grid(levels)
    else:
        if hosts is not None:
            require_whole_list("hosts", hosts, "[4, 4]")
        sizes = list(hosts) if hosts is not None else balanced_hosts(world_size)
        if min(sizes, default=0) < 1 or sum(sizes) != world_size:
            raise ConfigurationError(f"hosts={sizes} do not add up to world_size={world_size}: change one.")
        axes = _grid([sizes[0], len(sizes)]) if len(set(sizes)) == 1 else _uneven(sizes)
    chunks = math.prod(axis.blocks for axis in axes)
    widths = [chunks // math.prod(axis.blocks for axis in axes[: i + 1]) for i in range(len(axes))]
    bases = [np.zeros(world_size, np.int64)]
    for axis, width in zip(axes, widths, strict=True):
        bases.append(bases[-1] + axis.position * width)
    scatter = [_ring(f"{REDUCE_SCATTER}_{i}", axis, widths[i], bases[i], "add") for i, axis in enumerate(axes)]
    gather = [_ring(f"{ALL_GATHER}_{i}", axis, widths[i], bases[i], "copy") for i, axis in enumerate(axes)]
    stages = scatter + gather[::-1]
    return Schedule("hierarchical", world_size, chunks, tuple(each for stage in stages for each in stage))


def balanced_hosts(world_size: int) -> list[int]:
    """Sizes of about as many hosts as ranks on each: equal where a divisor is near the square root, else differing by
    at most one."""
    root = math.isqrt(world_size)
    for count in range(root, root // 2, -1):
        if world_size % count == 0:
            return [world_size // count] * count
    return [world_size // root + (host < world_size % root) for host in range(root)]


@dataclass(frozen=True)
class _Axis:
    """Rings of one level, as arrays over ranks: the place in its ring, the ring's length and the two neighbours.

    ``blocks`` is how many pieces a ring reduces: as many as its ranks, or as the smallest ring's. A ring of length 1
    rests.
    """

    position: Integers
    length: Integers
    left: Integers
    right: Integers
    blocks: int


def _axis(groups: Sequence[Integers], world_size: int, blocks: int) -> _Axis:
    position, length = np.zeros(world_size, np.int64), np.ones(world_size, np.int64)
    left, right = np.arange(world_size), np.arange(world_size)
    for group in groups:
        position[group], length[group] = np.arange(len(group)), len(group)
        left[group], right[group] = np.roll(group, 1), np.roll(group, -1)
    return _Axis(position, length, left, right, blocks)


def _grid(levels: Sequence[int]) -> list[_Axis]:
    """Ranks as a grid whose last axis is the innermost level."""
    grid = np.arange(math.prod(levels)).reshape(tuple(reversed(levels)))
    return [
        _axis(list(np.moveaxis(grid, -1 - i, -1).reshape(-1, size)), grid.size, size) for i, size in enumerate(levels)
    ]


def _uneven(sizes: Sequence[int]) -> list[_Axis]:
    ends = np.cumsum(sizes)
    hosts = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    shards = min(sizes)
    across = [np.array([host[shard] for host in hosts]) for shard in range(shards)]
    world_size = int(ends[-1])
    return [_axis(hosts, world_size, shards), _axis(across, world_size, len(sizes))]


def _ring(phase: str, axis: _Axis, width: int, base: Integers, op: Op) -> list[Round]:
    """All rings of an axis side by side, over blocks of ``width`` chunks from ``base`` on.

    A ring of ``n`` ranks over fewer than ``n`` blocks is that over ``n`` without the messages of the others.
    """
    world_size = len(base)

    def made(step: int) -> Round:
        def between(source: Integers, destination: Integers) -> Messages:
            length = axis.length[source]
            block = (axis.position[source] - step - (op == "add")) % length
            alive = (block < axis.blocks) & (step < length - 1)
            source, destination, block = source[alive], destination[alive], block[alive]
            return Messages.of(source, destination, base[source] + block * width, op, width)

        def sends(ranks: Integers) -> Messages:
            return between(ranks, axis.right[ranks])

        def receives(ranks: Integers) -> Messages:
            return between(axis.left[ranks], ranks)

        return Round(phase, step, world_size, sends, receives)

    return [made(step) for step in range(int(axis.length.max()) - 1)]
