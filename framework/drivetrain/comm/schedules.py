"""Schedules by name. Topologies are found through entry points, as a stranger's would be; no torch here."""

from __future__ import annotations

from drivetrain import registry
from drivetrain.comm.schedule import Kind, Messages, Round, Schedule, Topology, Transfer
from drivetrain.comm.topologies.ring import ring

__all__ = ["Kind", "Messages", "Round", "Schedule", "Topology", "Transfer", "names", "ring", "topology"]


def topology(name: str) -> Topology:
    """The function ``world_size -> Schedule`` registered as ``name`` under the entry points ``drivetrain.topologies``.

    Raises:
        ConfigurationError: no installed distribution registers ``name``.
    """
    found: Topology = registry.load("topologies", name)
    return found


def names() -> list[str]:
    """The names of all registered topologies."""
    return registry.names("topologies")
