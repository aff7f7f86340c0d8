"""Communication: process groups, collectives as data, their proof and their execution.

Nothing is imported here, so that what describes, proves, plays and costs collectives stays free of torch; the names
below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.comm import schedules as schedules
    from drivetrain.comm.calibrate import calibrate as calibrate
    from drivetrain.comm.check import ScheduleError as ScheduleError
    from drivetrain.comm.check import check as check
    from drivetrain.comm.communicator import Communicator as Communicator
    from drivetrain.comm.cost import predict as predict
    from drivetrain.comm.failures import CollectiveFailed as CollectiveFailed
    from drivetrain.comm.failures import CommunicationError as CommunicationError
    from drivetrain.comm.failures import PeerLost as PeerLost
    from drivetrain.comm.gradients import aggregate_gradients as aggregate_gradients
    from drivetrain.comm.groups import ByHost as ByHost
    from drivetrain.comm.simulate import ProtocolError as ProtocolError
    from drivetrain.comm.simulate import simulate as simulate
    from drivetrain.comm.synchronize import synchronize_model as synchronize_model
    from drivetrain.comm.world import join_world as join_world
    from drivetrain.comm.world import world_communicator as world_communicator

_HOMES = {
    "ByHost": "groups",
    "CollectiveFailed": "failures",
    "CommunicationError": "failures",
    "Communicator": "communicator",
    "PeerLost": "failures",
    "ProtocolError": "simulate",
    "ScheduleError": "check",
    "aggregate_gradients": "gradients",
    "join_world": "world",
    "predict": "cost",
    "synchronize_model": "synchronize",
    "world_communicator": "world",
}
_MODULES = ("calibrate", "check", "schedules", "simulate")  # three of them are called by their name as well
__all__ = [*_HOMES, *_MODULES]  # noqa: PLE0604  (they are strings)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"drivetrain.comm.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'drivetrain.comm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"drivetrain.comm.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
