"""A port for a job that opens it later.

Between the choice and the opening any of the many connections that tests make could take it, were it one of those that
the system gives to outgoing connections. So it is one below them.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_CHOICE = random.SystemRandom()  # tests seed the common one


def free_port() -> int:
    """A port on which nobody listens, and which no outgoing connection is given."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    while True:
        port = _CHOICE.randrange(lowest // 2, lowest)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue  # somebody has it
        return port
