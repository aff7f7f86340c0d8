"""What a communicator sent: bytes, messages and seconds, per operation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """The traffic of one operation on this rank."""

    calls: int = 0
    bytes_sent: int = 0
    messages: int = 0
    seconds: float = 0.0


class Statistics:
    """Running totals of one communicator on this rank, by operation.

    Bytes and messages of point-to-point operations are exact. For a collective that the transport runs itself they are
    those of the bandwidth-optimal algorithm, since transports do not report theirs. Seconds are the caller's time
    inside the operation; for a CUDA tensor that is the time to enqueue it.
    """

    def __init__(self) -> None:
        self.operations: dict[str, Traffic] = {}

    def record(self, operation: str, *, bytes_sent: int = 0, messages: int = 0, seconds: float = 0.0) -> None:
        """Add one call of ``operation``."""
        traffic = self.operations.get(operation)
        if traffic is None:
            traffic = self.operations.setdefault(operation, Traffic())
        traffic.calls += 1
        traffic.bytes_sent += bytes_sent
        traffic.messages += messages
        traffic.seconds += seconds

    def reset(self) -> None:
        """Forget everything counted so far."""
        self.operations.clear()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent, over all operations."""
        return sum(traffic.bytes_sent for traffic in self.operations.values())

    @property
    def messages(self) -> int:
        """Messages that this rank sent, over all operations."""
        return sum(traffic.messages for traffic in self.operations.values())

    @property
    def seconds(self) -> float:
        """Seconds that this rank spent inside operations."""
        return sum(traffic.seconds for traffic in self.operations.values())
