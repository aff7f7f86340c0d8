"""Messages between processes of one host through memory that they share: one copy in and one out, where a connection
takes both through the kernel.

Every rank owns memory in which it has a queue of a few slots for each other rank. A byte on a socket between the two
says that a slot has been filled, or read; so a rank that waits sleeps, and one whose peer is gone sees the end of the
stream. Messages from one rank to another arrive in the order in which they were sent. A note with each says what it is
a piece of, since memory is read whatever it holds: ranks that do not do the same would get numbers that mean nothing.
"""

from __future__ import annotations

import mmap
import select
import socket
import time
from collections import deque
from contextlib import suppress
from multiprocessing.util import register_after_fork

import numpy as np
import torch

from drivetrain.comm.failures import CollectiveFailed, CommunicationError, lost

# Of a slot. What is read of a message of this length is still in the cache that processors share.
SLOT_BYTES = 2**20
# A rank may be so many messages ahead of a reader.
SLOTS = 4
# Of a queue: its slots, then their notes.
NOTE_BYTES = 128
QUEUE_BYTES = SLOTS * SLOT_BYTES + -(-SLOTS * NOTE_BYTES // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY

_FILLED, _READ = b"f", b"r"
_GAVE_UP = 128  # and the rank that was lost; the last word


def _notes(queue: torch.Tensor) -> np.ndarray:
    """The notes of a queue's slots, over its memory."""
    start = SLOTS * SLOT_BYTES
    return queue[start : start + SLOTS * NOTE_BYTES].numpy().view(f"S{NOTE_BYTES}")


class Link:
    """The way to one peer and back; the queues of both are bytes.

    Attributes:
        note: of the messages under way.
        closed: whether the peer's end of the wire is gone; what it had said before counts.
        culprit: the rank that is lost if this link is: the peer, or the one for whose loss the peer gave up.
        free: slots that may be filled.
        arrived: messages that were not read.
        sends: messages that found no free slot, with their numbers.
        receives: destinations of the messages to come, with their numbers, in the order of the messages.
    """

    def __init__(self, peer: int, wire: socket.socket, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        self.peer, self.wire, self.outgoing, self.incoming = peer, wire, outgoing, incoming
        self._notes_out, self._notes_in = _notes(outgoing), _notes(incoming)
        self.note = b""
        wire.setblocking(False)
        self.closed = False
        self.culprit = peer
        self.free, self.arrived = SLOTS, 0
        self.sends: deque[tuple[int, torch.Tensor]] = deque()
        self.receives: deque[tuple[int, torch.Tensor]] = deque()
        self._next_out = self._next_in = 0

    def fill(self, message: torch.Tensor) -> None:
        """Put ``message`` into the next slot, which is free, and say so."""
        start = self._next_out * SLOT_BYTES
        self.outgoing[start : start + message.nbytes].view(message.dtype).copy_(message)
        self._notes_out[self._next_out] = self.note
        self._next_out = (self._next_out + 1) % SLOTS
        self.free -= 1
        self.say(_FILLED)

    def message(self, like: torch.Tensor) -> torch.Tensor:
        """The oldest message that was not read, of the length and dtype of ``like``, as it lies in its slot.

        Raises:
            CommunicationError: it is a piece of something else than what is under way here.
        """
        if (note := self._notes_in[self._next_in]) != self.note:
            theirs, mine = (each.decode(errors="replace") for each in (note, self.note))
            raise CommunicationError(
                f"the ranks do not do the same (rank {self.peer}: {theirs}; here: {mine}): call the same operation "
                "with the same shape, dtype and arguments on all of them; with DRIVETRAIN_CHECK_COLLECTIVES=1 each "
                "is compared before it begins."
            )
        start = self._next_in * SLOT_BYTES
        return self.incoming[start : start + like.nbytes].view(like.dtype)

    def release(self) -> None:
        """The oldest message has been read."""
        self._next_in = (self._next_in + 1) % SLOTS
        self.arrived -= 1
        self.say(_READ)

    def say(self, word: bytes) -> None:
        """Tell the peer, if it is there."""
        with suppress(OSError):  # it is gone: what it had said before counts, and who waits for more will hear of it
            self.wire.send(word)

    def hear(self) -> bool:
        """Take what the peer said since; whether it said anything."""
        try:
            words = self.wire.recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            words = b""
        self.closed = not words
        self.free += words.count(_READ)
        self.arrived += words.count(_FILLED)
        if words and words[-1] >= _GAVE_UP:
            self.culprit = words[-1] - _GAVE_UP
        return bool(words)

    @property
    def broken(self) -> bool:
        """Whether the peer is gone and something was still to go there or to come from there."""
        return self.closed and bool(self.sends or (self.receives and not self.arrived))


class SharedMemory:
    """This rank's links, by peer; they belong to one thread.

    Args:
        rank: this rank's number in the group called ``label``.
        timeout: seconds that a rank waits for another.
    """

    def __init__(self, rank: int, label: str, links: dict[int, Link], timeout: float) -> None:
        self.rank, self.label, self.links, self.timeout = rank, label, links, timeout
        self._aborted = False
        self._culprit: int | None = None
        self._bell, self._ringer = socket.socketpair()
        self._by_number = {link.wire.fileno(): link for link in links.values()}
        # A loader's worker that outlives its rank would keep the peers from seeing that it is gone.
        register_after_fork(self, SharedMemory.close)
        self._poll = select.poll()
        for number in (*self._by_number, self._bell.fileno()):
            self._poll.register(number, select.POLLIN)

    # -- messages -----------------------------------------------------------------------------------------------
    def begin(self, what: bytes) -> None:
        """From here on all messages, both ways, are pieces of ``what``, of which the first ``NOTE_BYTES`` count."""
        note = what[:NOTE_BYTES]
        for link in self.links.values():
            link.note = note

    def progress(self, done: list[bool], until: int = -1) -> None:
        """Move what can be moved without waiting, and note it in ``done`` by the messages' numbers. A message with the
        number ``until`` stays in its slot, and those that follow it in theirs."""
        for link in self.links.values():
            while link.sends and link.free:
                number, message = link.sends.popleft()
                link.fill(message)
                done[number] = True
            while link.arrived and link.receives and link.receives[0][0] != until:
                number, place = link.receives.popleft()
                place.copy_(link.message(place))
                link.release()
                done[number] = True

    def wait(self, needed: Link) -> None:
        """Sleep until a peer has said something.

        Raises:
            CollectiveFailed: a rank that something is still to go to or come from is gone, nobody said anything within
                the time-out, or the group was aborted.
        """
        deadline = time.monotonic() + self.timeout
        said = False
        while not said:
            for link in self.links.values():
                if link.broken:
                    raise self._lost(link.culprit, ConnectionError("connection closed by peer"))
            ready = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)
            if self._aborted:
                raise self._lost(needed.peer, ConnectionError("the group was aborted"))
            if not ready:
                raise self._lost(needed.peer, TimeoutError(f"timed out after {self.timeout:g} s"))
            for number, _ in ready:
                link = self._by_number[number]
                said = link.hear() or said
                if link.closed:
                    self._poll.unregister(number)

    def _lost(self, peer: int, error: Exception) -> CollectiveFailed:
        self._culprit = peer
        return CollectiveFailed(str(lost(self.rank, peer, self.label, error)))

    def require_whole(self) -> None:
        """Raise CollectiveFailed where the links were broken on purpose: messages of what failed then may lie there."""
        if self._aborted:
            raise CollectiveFailed(
                f"rank {self.rank} of group {self.label!r} has broken its connections, as an operation failed or the "
                "group was aborted: make a new group."
            )

    # -- the end ------------------------------------------------------------------------------------------------
    def fail(self) -> None:
        """An operation failed midway: what it left in the slots is nobody's, so the links are of no more use. The peers
        hear for whose loss, so that they name it and not this rank."""
        if self._culprit is not None and not self._aborted:
            for link in self.links.values():
                if link.peer != self._culprit:
                    link.say(bytes([_GAVE_UP + self._culprit]))
        self.abort()
        for link in self.links.values():  # what was under way holds the caller's tensor
            link.sends.clear()
            link.receives.clear()

    def abort(self) -> None:
        """Wake whoever waits here with an error, from any thread; the peers see a closed connection."""
        self._aborted = True
        with suppress(OSError):
            self._ringer.send(b"x")
        for link in self.links.values():
            with suppress(OSError):
                link.wire.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections; peers that still wait for something of this rank are told that it is gone."""
        for end in (self._bell, self._ringer, *(link.wire for link in self.links.values())):
            end.close()
