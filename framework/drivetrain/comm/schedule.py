"""A collective as data: for each round, who sends which chunk to whom, and whether it is added or copied.

One :class:`Schedule` serves every use of an algorithm: ``check`` proves it, ``execute`` runs it over any transport, and
a cost model or a drawing can read it. No torch and no numpy here, so a schedule can be examined before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Literal, NamedTuple

from drivetrain.errors import ConfigurationError, nearest

Op = Literal["add", "copy"]
REDUCE_SCATTER = "reduce_scatter"
ALL_GATHER = "all_gather"
GROUP = "drivetrain.topologies"


class Transfer(NamedTuple):
    """Rank ``source`` sends its present value of ``chunk`` to ``destination``, which adds it to its own or overwrites.

    All transfers of one round happen at once: each carries the value that its source held before the round.
    """

    source: int
    destination: int
    chunk: int
    op: Op


Round = tuple[Transfer, ...]


@dataclass(frozen=True)
class Schedule:
    """An all-reduce over ``world_size`` ranks of a tensor cut into ``chunks`` nearly equal pieces.

    ``phases`` names the phase of each round (``"reduce_scatter"`` or ``"all_gather"``) and is as long as ``rounds``.
    In one round a rank sends to at most one rank and receives from at most one; several chunks between the same two
    ranks are one message.
    """

    name: str
    world_size: int
    chunks: int
    rounds: tuple[Round, ...]
    phases: tuple[str, ...]


Topology = Callable[[int], Schedule]


def ring(world_size: int) -> Schedule:
    """The bandwidth-optimal ring: reduce-scatter, then all-gather, in ``2 (N - 1)`` rounds over ``N`` chunks.

    Every rank sends ``2 (N - 1) / N`` of the tensor, which no all-reduce can undercut, and only to its right
    neighbour. A chunk is summed along one fixed path and then copied, so all ranks end with the same bits.

    Source: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

    Raises:
        ConfigurationError: ``world_size`` is below one.
    """
    if world_size < 1:
        raise ConfigurationError(f"a ring needs at least one rank, got world_size={world_size}: pass 1 or more.")
    steps = range(world_size - 1)

    def round_of(shift: int, op: Op) -> Round:
        return tuple(Transfer(r, (r + 1) % world_size, (r - shift) % world_size, op) for r in range(world_size))

    # After N - 1 additions rank r holds the whole sum of chunk r + 1: that is where the copying starts.
    rounds = tuple(round_of(step, "add") for step in steps) + tuple(round_of(step - 1, "copy") for step in steps)
    phases = (REDUCE_SCATTER,) * len(steps) + (ALL_GATHER,) * len(steps)
    return Schedule("ring", world_size, world_size, rounds, phases)


def topology(name: str) -> Topology:
    """The function ``world_size -> Schedule`` registered as ``name`` under the entry-point group of topologies.

    Raises:
        ConfigurationError: no installed distribution registers ``name``.
    """
    known = {point.name: point for point in entry_points(group=GROUP)}
    if name not in known:
        raise ConfigurationError(f"unknown topology {name!r}: {nearest(name, known)}")
    return known[name].load()
