"""Schedules by name. Topologies are found through entry points, as a stranger's would be; no torch here."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from drivetrain import registry
from drivetrain.comm.arguments import require_name, require_whole, require_whole_list
from drivetrain.comm.schedule import Kind, Messages, Round, Schedule, Topology, Transfer
from drivetrain.comm.topologies.chain import chain
from drivetrain.comm.topologies.double_tree import double_tree
from drivetrain.comm.topologies.doubling import recursive_doubling
from drivetrain.comm.topologies.halving_doubling import halving_doubling
from drivetrain.comm.topologies.hierarchical import hierarchical
from drivetrain.comm.topologies.ring import ring
from drivetrain.comm.topologies.tree import tree

__all__ = [
    "Kind",
    "Messages",
    "Round",
    "Schedule",
    "Topology",
    "Transfer",
    "chain",
    "double_tree",
    "halving_doubling",
    "hierarchical",
    "make",
    "names",
    "recursive_doubling",
    "ring",
    "takes_hosts",
    "topology",
    "tree",
]


def topology(name: str) -> Topology:
    """The function ``world_size -> Schedule`` registered as ``name`` under the entry points ``drivetrain.topologies``.

    Raises:
        ConfigurationError: no installed distribution registers ``name``.
    """
    require_name("topology", name, names())
    found: Topology = registry.load("topologies", name)
    return found


def names() -> list[str]:
    """The names of all registered topologies."""
    return registry.names("topologies")


def takes_hosts(name: str) -> bool:
    """Whether topology ``name`` takes a keyword ``hosts``: the ranks on each. Raises as :func:`topology`."""
    return "hosts" in inspect.signature(topology(name)).parameters


def make(name: str, world_size: int, hosts: Sequence[int] | None = None) -> Schedule:
    """The all-reduce of topology ``name`` for ``world_size`` ranks.

    Args:
        name: As registered.
        world_size: Number of ranks.
        hosts: Number of ranks on each host; where there are several, topologies that take a keyword of this name get
            it. On a single host all ranks are alike, so that these arrange them as they do without it.

    Raises:
        ConfigurationError: there is no such topology, or it cannot be made for these numbers.
    """
    made = topology(name)
    require_whole("world_size", world_size)
    if hosts is not None:
        require_whole_list("hosts", hosts, "[4, 4]")
    if hosts is not None and len(hosts) > 1 and takes_hosts(name):
        return made(world_size, hosts=hosts)  # type: ignore[call-arg]
    return made(world_size)
