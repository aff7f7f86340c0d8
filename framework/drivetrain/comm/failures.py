"""What goes wrong between ranks, as errors that name the rank and the way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from drivetrain.errors import DrivetrainError

_PLACE = re.compile(r"\[[^\]]*gloo/[^\]]*\] ")  # in the transport's own source
Operation = TypeVar("Operation", bound=Callable[..., Any])


class CommunicationError(DrivetrainError):
    """Ranks could not exchange what they were asked to; says which rank and what to do."""


class Unsendable(CommunicationError):
    """What a caller brought is no tensor or array that can travel. ``placed``: the message says where that was."""

    def __init__(self, message: str, *, placed: bool = False) -> None:
        super().__init__(message)
        self.placed = placed


class PeerLost(CommunicationError, RuntimeError):
    """The connection to a rank is gone: it died, closed its group, or let the time-out pass. ``rank`` is that rank's
    number in the group."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class CollectiveFailed(CommunicationError, RuntimeError):
    """A collective broke because a rank is gone or late; which one, the transport does not tell every rank."""


def explained(operation: Operation) -> Operation:
    """A method of a communicator whose transport's errors become :class:`CollectiveFailed`, and which says where it was
    given what cannot be sent; other errors stay as they are."""
    name = operation.__name__

    @wraps(operation)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return operation(self, *args, **kwargs)
        except Unsendable as error:
            if error.placed:
                raise
            place = f"{name} on rank {self.rank} of group {self.label!r}"
            raise Unsendable(f"{place}: {error}", placed=True) from error.__cause__
        except RuntimeError as error:
            if isinstance(error, CommunicationError) or not _of_transport(error):
                raise
            raise CollectiveFailed(
                f"{name} on rank {self.rank} of group {self.label!r} lost another rank "
                f"({first_line(error)}): see the logs of the other ranks, one of which failed, ended, or did not come "
                "within the group's time-out."
            ) from error

    return cast(Operation, run)


def alone(operation: Operation) -> Operation:
    """As :func:`explained`, for what all ranks do together: refused while another thread is in such an operation of the
    same communicator. Which of the two came first would be another on each rank, and each would get the other's
    numbers."""
    run = explained(operation)
    name = operation.__name__

    @wraps(operation)
    def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.entered.acquire(blocking=False):
            raise CommunicationError(
                f"{name} on rank {self.rank} of group {self.label!r} while another thread is in an operation of the "
                "same group: give each thread a communicator of its own, made with split(0)."
            )
        try:
            return run(self, *args, **kwargs)
        finally:
            self.entered.release()

    return cast(Operation, enter)


def _of_transport(error: RuntimeError) -> bool:
    # Gloo raises plain errors that say where in its source they come from, but for what a group says that has broken
    # its connections itself, after a time-out; torch has types for the rest.
    said = str(error)
    return type(error).__name__.startswith("Dist") or "gloo/" in said or "caused pair closure" in said


def lost(rank: int, peer: int, label: str, error: Exception) -> PeerLost:
    """The transport's ``error`` on the way between ``rank`` and ``peer`` as a :class:`PeerLost`."""
    return PeerLost(
        f"rank {rank} lost rank {peer} of group {label!r} ({first_line(error)}): see the log of rank {peer}, which "
        "failed, ended, or had nothing to say within the group's time-out.",
        peer,
    )


def first_line(error: Exception) -> str:
    """What a transport's message says, without the place in its source, the advice and the trace of addresses."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return _PLACE.sub("", line.partition(". This is typically")[0])
