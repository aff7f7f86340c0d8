"""A worker's side: one connection to every server, requests with a time-out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from drivetrain.errors import TrainingError
from drivetrain_plugins.parameter_server.departures import Departures, PeerGoneError
from drivetrain_plugins.parameter_server.endpoint import Keys
from drivetrain_plugins.parameter_server.window import Window
from drivetrain_plugins.parameter_server.wire import Message, decode, encode, size

_LOOK = 100  # milliseconds between two looks at the clock


class Client:
    """Talks to all servers of the job.

    Args:
        addresses: of the servers, in their order.
        rank: of this worker among the workers.
        timeout: seconds that an answer may take.
        keys, servers: this worker's keys and the servers' public ones, None for none.
        zero_copy: send tensors from where they lie. ZeroMQ then keeps a thread in this process for good.
        ranks: of the servers in the job, to name them by.

    Attributes:
        bytes_sent, messages: what this worker sent.
        waits: called again and again while an answer is waited for; raises where none can come any more.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        rank: int,
        timeout: float,
        keys: Keys | None = None,
        servers: Sequence[bytes] | None = None,
        zero_copy: bool = True,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.zero_copy = zero_copy
        self.rank, self.timeout = rank, timeout
        self.ranks = list(ranks) if ranks is not None else list(range(len(addresses)))
        self.bytes_sent = self.messages = 0
        self.windows: Sequence[Window | None] = [None] * len(addresses)  # memory shared with the servers
        self.context = zmq.Context()
        self.sockets: list[Any] = []
        self.departures: list[Departures] = []
        for number, address in enumerate(addresses):
            socket: Any = self.context.socket(zmq.DEALER)
            socket.linger = 1000
            socket.sndhwm = socket.rcvhwm = 0
            socket.sndtimeo = int(1000 * timeout)  # where the other side hung up, sending would wait for ever
            socket.identity = f"worker-{rank}".encode()
            if keys is not None and servers is not None:
                socket.curve_secretkey, socket.curve_publickey = keys.secret, keys.public
                socket.curve_serverkey = servers[number]
            self.departures.append(Departures(socket))
            socket.connect(address)
            self.sockets.append(socket)
        self.reached = [False] * len(self.sockets)  # servers that answered: the connection had been made
        self.gone = [False] * len(self.sockets)
        self.said_goodbye = False
        self.waits: Callable[[], None] = lambda: None

    def send(self, number: int, message: Message) -> None:
        """To server ``number``; returns at once."""
        message.fields["rank"] = self.rank
        frames = encode(message)
        self.bytes_sent += size(message, frames)
        self.messages += 1
        try:
            self.sockets[number].send_multipart(frames, copy=not self.zero_copy)
        except zmq.Again:
            raise TrainingError(
                f"parameter server {number} takes no messages of worker {self.rank}: see the log of its rank."
            ) from None

    def receive(self, number: int, kind: str) -> Message:
        """The next message of server ``number``, which must be of ``kind``.

        Raises:
            TrainingError: none came in time, the server refuses, or it or another worker is gone; and what ``waits``
                raises.
        """
        deadline = time.monotonic() + self.timeout
        while not self.sockets[number].poll(_LOOK):
            self.waits()
            if self._is_gone(number) and not self.sockets[number].poll(0):
                raise PeerGoneError(
                    f"rank {self.ranks[number]} (parameter server {number}) is gone, its connection was closed: see"
                    " the log of that rank."
                )
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"parameter server {number} did not answer worker {self.rank} within {self.timeout:g} s: see the"
                    " log of its rank, or raise timeout."
                )
        window = self.windows[number]
        frames = [frame.buffer for frame in self.sockets[number].recv_multipart(copy=False)]
        answer = decode(frames, window.areas if window is not None else ())
        self.reached[number] = True
        if answer.kind == "lost":
            lost = answer.number("worker")
            raise PeerGoneError(f"rank {lost} is gone, its connection was closed: see the log of that rank.")
        if answer.kind == "refused":
            raise TrainingError(f"parameter server {number} refuses worker {self.rank}: {answer.fields.get('why')}.")
        if answer.kind != kind:
            raise TrainingError(f"parameter server {number} answered {answer.kind!r} instead of {kind!r}.")
        return answer

    def _is_gone(self, number: int) -> bool:
        if self.departures[number].take() and self.reached[number]:
            self.gone[number] = True
        return self.gone[number]

    def greet(self) -> None:
        """Let the servers know this connection, so that they notice when it is closed."""
        for number in range(len(self.sockets)):
            self.send(number, Message("hello"))

    def ask(self, make: Callable[[int], Message], kind: str) -> list[Message]:
        """Send every server its message, then take every server's answer."""
        for number in range(len(self.sockets)):
            self.send(number, make(number))
        return [self.receive(number, kind) for number in range(len(self.sockets))]

    def goodbye(self) -> None:
        """Tell the servers that nothing more will come; nobody is waited for."""
        if not self.said_goodbye:
            self.said_goodbye = True
            frames = encode(Message("done", {"rank": self.rank}))
            for socket in self.sockets:
                try:
                    socket.send_multipart(frames, zmq.DONTWAIT)
                except zmq.Again:
                    continue  # it is gone, or never let this worker in
                self.bytes_sent += sum(len(frame) for frame in frames)
                self.messages += 1

    def close(self) -> None:
        if self.context.closed:
            return
        for departures in self.departures:
            departures.close()
        for socket in self.sockets:
            socket.close()
        self.context.term()
