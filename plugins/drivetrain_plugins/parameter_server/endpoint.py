"""Where a server listens, and who may talk to it: on loopback anyone of this machine; off it only the job's workers,
with CURVE keys (elliptic-curve authentication and encryption, Bernstein's CurveCP as ZeroMQ has it).
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.auth.thread

Publish = Callable[[str, str], None]
Read = Callable[[str], str]


@dataclass(frozen=True)
class Keys:
    """A key pair of one socket, in Z85 text."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> Keys:
        return cls(*zmq.curve_keypair())


class _Allowed:
    """The keys of the job's workers (Z85 text), as ZeroMQ's authenticator asks for them."""

    def __init__(self, keys: set[bytes]) -> None:
        self.keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self.keys


class Listener:
    """A server's bound socket.

    Args:
        host: address to bind; a free port of it is chosen.
        keys: the server's keys, None for none.
        allowed: public keys of the workers.
    """

    def __init__(self, host: str, keys: Keys | None = None, allowed: set[bytes] | None = None) -> None:
        self.context = zmq.Context()
        self.public = keys.public if keys is not None else None
        self.guard: Any = None
        if keys is not None:
            self.guard = zmq.auth.thread.ThreadAuthenticator(self.context)
            self.guard.start()
            self.guard.configure_curve_callback(domain="*", credentials_provider=_Allowed(allowed or set()))
        self.socket: Any = self.context.socket(zmq.ROUTER)
        self.socket.linger = 1000
        self.socket.sndhwm = self.socket.rcvhwm = 0
        if keys is not None:
            self.socket.curve_server = True
            self.socket.curve_secretkey, self.socket.curve_publickey = keys.secret, keys.public
        self.port = self.socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{self.port}"

    def close(self) -> None:
        self.socket.close()
        if self.guard is not None:
            self.guard.stop()
        self.context.term()


def address_of_this_host(towards: str) -> str:
    """The address by which ``towards`` can reach this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing: only the route is looked up
        return str(probe.getsockname()[0])
