"""Receiving from whichever rank sends first: one receiver per rank, each in a thread of its own.

The transport's own receive from any source neither wakes nor raises when a rank dies, so it is not used. A receive
from a given rank does raise, and a thread that waits in it costs nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from drivetrain.comm.failures import CommunicationError, lost

if TYPE_CHECKING:
    from drivetrain.comm.communicator import Communicator


class _Arrival:
    """A message of ``peer``, or why there will be none."""

    __slots__ = ("buffer", "error", "peer")

    def __init__(self, peer: int, buffer: torch.Tensor, error: Exception | None) -> None:
        self.peer, self.buffer, self.error = peer, buffer, error


class _Claim:
    """The message of one rank that somebody asked for by the rank's name: it comes once the receiver has it."""

    __slots__ = ("arrival",)

    def __init__(self, arrival: _Arrival | None = None) -> None:
        self.arrival = arrival


class _Inbox:
    """Everything that arrives under one tag. Receives are posted only while somebody waits for a message, at most one
    for each rank; one that is left over is the first to be looked at next time, or is claimed for its rank."""

    def __init__(self, group: dist.ProcessGroup, rank: int, tag: int) -> None:
        self.group, self.rank, self.tag = group, rank, tag
        self.changed = threading.Condition()
        self.arrived: deque[_Arrival] = deque()
        self.posted: dict[int, int] = {}  # rank to bytes, while a receive waits or its message was not taken
        self.claims: dict[int, deque[_Claim]] = {}  # of each rank, in the order of its messages
        self.gone: set[int] = set()
        self.size = group.size()
        self._orders: dict[int, SimpleQueue[torch.Tensor | None]] = {}
        self._threads: list[threading.Thread] = []

    def post_all(self, nbytes: int) -> None:
        """Have a receive of ``nbytes`` waiting for every rank that is alive and has none."""
        for peer in range(self.size):
            if peer == self.rank or peer in self.posted or peer in self.gone:
                continue
            self.posted[peer] = nbytes
            if peer not in self._orders:
                orders = self._orders[peer] = SimpleQueue()
                name = f"drivetrain receiver of rank {peer}, tag {self.tag}"
                thread = threading.Thread(target=self._receive, args=(peer, orders), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._orders[peer].put(torch.empty(nbytes, dtype=torch.uint8))

    def _receive(self, peer: int, orders: SimpleQueue[torch.Tensor | None]) -> None:
        while (buffer := orders.get()) is not None:
            error = None
            try:
                self.group.recv([buffer], peer, self.tag).wait()
            except RuntimeError as problem:
                error = problem
            with self.changed:
                arrival = _Arrival(peer, buffer, error)
                if self.claims.get(peer):
                    self.claims[peer].popleft().arrival = arrival
                else:
                    self.arrived.append(arrival)
                self.changed.notify_all()

    def next(self) -> _Arrival:
        """The oldest arrival that nobody claimed; waits for it."""
        with self.changed:
            while not self.arrived:
                self.changed.wait()
            arrival = self.arrived.popleft()
            del self.posted[arrival.peer]
            return self._noted(arrival)

    def claim(self, peer: int, nbytes: int) -> _Claim | None:
        """A claim to the next message of ``peer`` where a receive that is posted will get it; None where none is."""
        with self.changed:
            if peer in self.posted:
                del self.posted[peer]
                for arrival in self.arrived:
                    if arrival.peer == peer:
                        self.arrived.remove(arrival)
                        return _Claim(arrival)
            elif self.claims.get(peer):
                # Messages are told apart by the order of their receives, so this one queues behind those.
                self._orders[peer].put(torch.empty(nbytes, dtype=torch.uint8))
            else:
                return None
            claim = _Claim()
            self.claims.setdefault(peer, deque()).append(claim)
            return claim

    def wait(self, claim: _Claim) -> _Arrival:
        """What was claimed; waits for it."""
        with self.changed:
            while claim.arrival is None:
                self.changed.wait()
            return self._noted(claim.arrival)

    def _noted(self, arrival: _Arrival) -> _Arrival:
        if arrival.error is not None:
            self.gone.add(arrival.peer)
        return arrival

    def waiting(self) -> bool:
        """Whether a thread waits in the transport."""
        with self.changed:
            return len(self.posted) > len(self.arrived) or any(self.claims.values())

    def dismiss(self) -> None:
        for orders in self._orders.values():
            orders.put(None)

    def join(self, seconds: float) -> None:
        for thread in self._threads:
            thread.join(seconds)


class Arrivals:
    """The receivers of one communicator, made when a message from any rank is first asked for.

    Messages under one tag must be of one size while a receive waits for them: the transport takes a receive's length
    when it is posted.
    """

    def __init__(self, comm: Communicator) -> None:
        self._group, self._rank, self._label = comm.group, comm.rank, comm.label
        self._device = comm.device
        self._inboxes: dict[int, _Inbox] = {}

    def take(self, tag: int, into: torch.Tensor) -> int:
        """Fill the flat tensor ``into`` with the next message of any rank; returns that rank.

        Raises:
            PeerLost: a rank died; raised once for each, after everything that it had sent. The others can still be
                heard.
            CommunicationError: there is no other rank left, the transport is not Gloo, or a receive of another size
                is waiting under this tag.
        """
        if self._group is None or self._device.type != "cpu":
            raise CommunicationError(
                f"rank {self._rank} of group {self._label!r} cannot receive from any rank: "
                + ("it has no peer." if self._group is None else "NCCL has no such receive; name the source.")
            )
        inbox = self._inboxes.get(tag)
        if inbox is None:
            inbox = self._inboxes[tag] = _Inbox(self._group, self._rank, tag)
        if len(inbox.gone) == inbox.size - 1:
            raise CommunicationError(f"rank {self._rank} of group {self._label!r} has no peer left to hear from.")
        for peer, nbytes in inbox.posted.items():
            self._same_size(peer, nbytes, into, tag)
        inbox.post_all(into.nbytes)
        return self._deliver(inbox.next(), into)

    def claim(self, source: int, tag: int, into: torch.Tensor) -> Callable[[], None] | None:
        """Claim the next message of ``source`` if a receive from any rank is already waiting for it, which would get it
        otherwise; None if there is none. What is returned waits for the message and fills ``into``, or raises
        :class:`PeerLost`."""
        inbox = self._inboxes.get(tag)
        if inbox is None:
            return None
        self._same_size(source, inbox.posted.get(source, into.nbytes), into, tag)
        claim = inbox.claim(source, into.nbytes)
        if claim is None:
            return None

        def fill() -> None:
            self._deliver(inbox.wait(claim), into)

        return fill

    def take_from(self, source: int, tag: int, into: torch.Tensor) -> bool:
        """:meth:`claim` and wait; False if there is nothing to claim."""
        fill = self.claim(source, tag, into)
        if fill is None:
            return False
        fill()
        return True

    def _same_size(self, peer: int, posted: int, into: torch.Tensor, tag: int) -> None:
        if posted != into.nbytes:
            raise CommunicationError(
                f"a receive of {posted} bytes from any rank waits for rank {peer} under tag {tag}, and now "
                f"{into.nbytes} are asked for: give messages of another size another tag."
            )

    def _deliver(self, arrival: _Arrival, into: torch.Tensor) -> int:
        if arrival.error is not None:
            raise lost(self._rank, arrival.peer, self._label, arrival.error) from arrival.error
        into.view(torch.uint8).copy_(arrival.buffer)
        return arrival.peer

    def close(self) -> bool:
        """Let the threads go that wait for nothing; returns whether others still wait in the transport."""
        for inbox in self._inboxes.values():
            inbox.dismiss()
        return any(inbox.waiting() for inbox in self._inboxes.values())

    def join(self, seconds: float = 1.0) -> None:
        """Wait until all threads have ended, and forget them."""
        for inbox in self._inboxes.values():
            inbox.join(seconds)
        self._inboxes.clear()
