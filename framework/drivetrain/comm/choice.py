"""Which algorithm carries an operation: the one that the caller names, or one chosen where that is left open."""

from __future__ import annotations

from drivetrain import registry
from drivetrain.comm.schedule import Schedule


def choose(op: str, nbytes: int, world_size: int) -> str:
    """The algorithm for ``op`` on ``nbytes`` per rank: ``"native"`` or the name of a topology.

    Must give the same answer on every rank. Without a calibration of the machine the transport's own is taken.
    """
    return "native"


def schedule_of(name: str, world_size: int) -> Schedule:
    """The all-reduce of topology ``name`` for ``world_size`` ranks.

    Raises:
        ConfigurationError: no topology is called ``name``.
    """
    topology = registry.load("topologies", name)
    schedule: Schedule = topology(world_size)
    return schedule
