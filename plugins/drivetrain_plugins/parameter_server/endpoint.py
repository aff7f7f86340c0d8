"""Where a server listens, and who may talk to it: on loopback anyone of this machine; off it only the job's workers,
with CURVE keys (elliptic-curve authentication and encryption, Bernstein's CurveCP as ZeroMQ has it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zmq
import zmq.auth.thread

from drivetrain_plugins.parameter_server.departures import Departures
from drivetrain_plugins.parameter_server.wire import HEADER_LIMIT

# Bytes that an encrypted frame has beyond the plain one (ZeroMQ RFC 26, MESSAGE): the command's name 8, a nonce 8, the
# authenticator 16, flags 1. ZeroMQ holds the encrypted one to ``maxmsgsize``.
_SEALED = 8 + 8 + 16 + 1


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
        largest: bytes that a frame of a message may have before it is encrypted; who sends a larger one is cut off
            before it is read.
    """

    def __init__(
        self, host: str, keys: Keys | None = None, allowed: set[bytes] | None = None, largest: int = HEADER_LIMIT
    ) -> None:
        self.context = zmq.Context()
        self.public = keys.public if keys is not None else None
        self.guard: Any = None
        if keys is not None:
            self.guard = zmq.auth.thread.ThreadAuthenticator(self.context)
            self.guard.start()
            self.guard.configure_curve_callback(domain="*", credentials_provider=_Allowed(allowed or set()))
        self.socket: Any = self.context.socket(zmq.ROUTER)
        self.socket.linger = 1000
        self.socket.maxmsgsize = max(largest, HEADER_LIMIT) + (_SEALED if keys is not None else 0)
        self.socket.sndhwm = self.socket.rcvhwm = 0
        if keys is not None:
            self.socket.curve_server = True
            self.socket.curve_secretkey, self.socket.curve_publickey = keys.secret, keys.public
        self.departures = Departures(self.socket)
        self.port = self.socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{self.port}"

    def close(self) -> None:
        if self.socket.closed:
            return
        self.departures.close()
        self.socket.close()
        if self.guard is not None:
            self.guard.stop()
        self.context.term()
