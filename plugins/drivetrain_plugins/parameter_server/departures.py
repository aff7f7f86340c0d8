"""Notices that the other end of a connection is gone.

A process that is killed says no goodbye, but its kernel closes its sockets. ZeroMQ hides that and waits for the other
end to come back; its monitor tells. Messages that were under way are lost then, so nobody is waited for.
"""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from drivetrain.errors import TrainingError


class PeerGoneError(TrainingError, ConnectionError):
    """Another process is gone. A ConnectionError, by which the launcher tells an echo from the first cause."""


class Departures:
    """Watches the connections of ``socket``.

    Attributes:
        events: becomes readable when there is something to take; for pollers.
    """

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.events: Any = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def take(self) -> list[int]:
        """File descriptors of the connections that were closed since this was last asked."""
        found = []
        while self.events.poll(0):
            found.append(int(recv_monitor_message(self.events)["value"]))
        return found

    def close(self) -> None:
        """Before the socket itself is closed."""
        self.socket.disable_monitor()
        self.events.close(linger=0)
