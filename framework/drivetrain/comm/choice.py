"""Which algorithm carries an operation: the one that the caller names, or the one expected to be fastest.

All ranks must choose alike, and the calibration lies in a file of each machine. So rank 0's is taken, at the first
choice of a communicator, together with who shares a host.
"""

from __future__ import annotations

import warnings
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from drivetrain.comm import calibration, schedules
from drivetrain.comm.calibration import NATIVE, Calibration, Hosts
from drivetrain.comm.schedule import Schedule
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.comm.communicator import Communicator


class Agreed(NamedTuple):
    """What the ranks of a communicator know alike: ranks per host (None: a host's do not follow each other), and the
    calibration of this kind of device, if rank 0 has one."""

    hosts: Hosts | None
    calibration: Calibration | None


_agreed: WeakKeyDictionary[Communicator, Agreed] = WeakKeyDictionary()


def agreed(comm: Communicator) -> Agreed:
    """What the ranks know alike; exchanged once, so all ranks must ask at the same point.

    Raises:
        ConfigurationError: rank 0's calibration cannot be read; raised on every rank.
    """
    found = _agreed.get(comm)
    if found is None:
        found = _agreed[comm] = _exchange(comm)
    return found


def _exchange(comm: Communicator) -> Agreed:
    from drivetrain.comm.communicator import Communicator
    from drivetrain.comm.groups import host_name

    if comm.group is None:
        return Agreed((1,), None)
    mine, problem = None, ""
    if comm.is_master:
        path = calibration.place(comm.device.type)
        # As text, and why there is none: a file that is no calibration is an error of every rank.
        try:
            mine = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
        except OSError as error:
            problem = str(error)
    # Not among the traffic that is counted: it happens once, at a moment that the caller did not choose.
    said = Communicator(comm.group, comm.device, comm.label).all_gather_plain([host_name(), mine, problem])
    if said[0][2]:
        raise ConfigurationError(f"the calibration of rank 0 cannot be read: {said[0][2]}: calibrate again.")
    names = [name for name, *_ in said]
    runs = [(name, len(list(ranks))) for name, ranks in groupby(names)]
    hosts = tuple(count for _, count in runs) if len(runs) == len(set(names)) else None
    text = said[0][1]
    return Agreed(hosts, None if text is None else Calibration.of_text(text, "the calibration of rank 0"))


def ranks_per_host(comm: Communicator) -> Hosts | None:
    """How many of the ranks each host has, in their order; None where a host's do not follow each other. Exchanged as
    :func:`agreed` says."""
    return agreed(comm).hosts


def choose(comm: Communicator, op: str, nbytes: int) -> str:
    """The algorithm for ``op`` on ``nbytes`` per rank: ``"native"`` or the name of a topology.

    The same on every rank. Without a calibration for these ranks the transport's own is taken. Raises as
    :func:`agreed`.
    """
    if comm.world_size == 1 or op != "all_reduce":
        return NATIVE
    hosts, model = agreed(comm)
    return NATIVE if hosts is None or model is None else model.choose(nbytes, hosts)


def inherit(child: Communicator, parent: Communicator) -> None:
    """Let ``child``, of the same ranks, know what ``parent`` knows, without an exchange."""
    if parent in _agreed:
        _agreed[child] = _agreed[parent]


def knows(comm: Communicator) -> bool:
    """Whether a choice can be other than the transport's own: there is a calibration for these ranks."""
    hosts, model = agreed(comm)
    return model is not None and hosts in model.worlds


def schedule_of(name: str, comm: Communicator) -> Schedule:
    """The all-reduce of topology ``name`` for the ranks of ``comm``; one that takes ``hosts`` is made for those there
    are. Rank 0 warns where it cannot be, since the ranks of a host do not follow each other.

    Raises:
        ConfigurationError: no topology is called ``name``.
    """
    hosts = None
    if schedules.takes_hosts(name):
        hosts = ranks_per_host(comm)
        if hosts is None and comm.is_master:
            warnings.warn(
                f"{name} does not follow the hosts of group {comm.label!r}, whose ranks do not follow each other: "
                "number the ranks host by host (mpirun --map-by slot).",
                stacklevel=2,
            )
    return schedules.make(name, comm.world_size, hosts)
