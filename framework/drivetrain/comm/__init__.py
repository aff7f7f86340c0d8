"""Communication: process groups, collectives as data, their proof and their execution.

Nothing is imported here until a name is used, so that what describes, proves, plays and costs collectives stays free of
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.comm.communicator import ByHost as ByHost
    from drivetrain.comm.communicator import CommunicationError as CommunicationError
    from drivetrain.comm.communicator import Communicator as Communicator
    from drivetrain.comm.communicator import PeerLost as PeerLost
    from drivetrain.comm.communicator import world as world

__all__ = ["ByHost", "CommunicationError", "Communicator", "PeerLost", "world"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'drivetrain.comm' has no attribute {name!r}")
    return getattr(importlib.import_module("drivetrain.comm.communicator"), name)


def __dir__() -> list[str]:
    return __all__
