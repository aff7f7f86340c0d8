"""By which of its addresses this machine is reached from the other nodes of a job.

A host's name is no help: it may have no address, or the loopback's (Debian writes 127.0.1.1 beside it). The way to the
first node is sure, since every node takes it. IPv4 only.
"""

from __future__ import annotations

import fcntl
import socket
import struct

LOOPBACK_NAMES = ("localhost", "127.0.0.1")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def interfaces() -> dict[str, str]:
    """The interfaces that have an IPv4 address, with their first; those that are down too."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def address_towards(host: str) -> str:
    """The address by which ``host``, the first node of a job, reaches this machine.

    On the first node itself that is its own; where its name stands for the loopback, the address of its only other
    interface, if it has just one.

    Raises:
        OSError: ``host`` has no IPv4 address, or no way leads there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: only the route is looked up
        address = str(probe.getsockname()[0])
    if not address.startswith("127.") or host in LOOPBACK_NAMES:
        return address
    outer = [one for one in interfaces().values() if not one.startswith("127.")]
    return outer[0] if len(outer) == 1 else address


def interface_towards(host: str) -> str | None:
    """The name of the interface with :func:`address_towards`; None where it cannot be told."""
    try:
        address = address_towards(host)
    except OSError:
        return None
    if address.startswith("127.") and host not in LOOPBACK_NAMES:
        return None  # others could not come in there
    return next((name for name, own in interfaces().items() if own == address), None)
