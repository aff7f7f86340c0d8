"""What goes wrong between ranks, as errors that name the rank and the way out."""

from __future__ import annotations

from drivetrain.errors import DrivetrainError


class CommunicationError(DrivetrainError):
    """Ranks could not exchange what they were asked to; says which rank and what to do."""


class PeerLost(CommunicationError, RuntimeError):
    """The connection to a rank is gone: it died, closed its group, or let the time-out pass. ``rank`` is that rank's
    number in the group."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def lost(rank: int, peer: int, label: str, error: Exception) -> PeerLost:
    """The transport's ``error`` on the way between ``rank`` and ``peer`` as a :class:`PeerLost`."""
    return PeerLost(
        f"rank {rank} lost rank {peer} of group {label!r} ({first_line(error)}): see the log of rank {peer}, which "
        "failed, ended, or had nothing to say within the group's time-out.",
        peer,
    )


def first_line(error: Exception) -> str:
    """What a transport's message says, without the advice and the trace of addresses that follow."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.partition(". This is typically")[0]
