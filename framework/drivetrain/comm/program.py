"""What one rank does to carry out a schedule: a straight line of instructions with no decision left to take.

A message is cut into segments, and a segment is sent on as soon as it has been summed, while the rest of its chunk is
still arriving. Cutting and ordering happen once per schedule, length and rank; executing is a loop over the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple

from drivetrain.comm.schedule import Messages, Op, Schedule


class Span(NamedTuple):
    """Elements ``start`` to ``stop`` of a flat tensor."""

    start: int
    stop: int

    def overlaps(self, other: Span) -> bool:
        return self.start < other.stop and other.start < self.stop


class Message(NamedTuple):
    """One span exchanged with ``peer``; ``op`` says what the receiver does with it."""

    peer: int
    span: Span
    op: Op


class Exchange(NamedTuple):
    """What one rank sends and receives in one round, empty spans left out."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


def exchanges(schedule: Schedule, numel: int, rank: int) -> list[Exchange]:
    """The messages of ``rank`` in each round for a tensor of ``numel`` elements; adjacent chunks are one message."""
    chunks = schedule.chunks
    return [
        Exchange(
            _merged(part.sends, part.sends.destination.tolist(), numel, chunks),
            _merged(part.receives, part.receives.source.tolist(), numel, chunks),
        )
        for part in schedule.of_rank(rank)
    ]


def _merged(messages: Messages, peers: list[int], numel: int, chunks: int) -> tuple[Message, ...]:
    """Both sides of a message order and cut it alike: by peer, then by chunk."""
    merged: list[Message] = []
    rows = zip(peers, messages.chunk.tolist(), messages.count.tolist(), messages.add.tolist(), strict=True)
    for peer, chunk, count, add in sorted(rows):
        span = Span(numel * chunk // chunks, numel * (chunk + count) // chunks)
        op: Op = "add" if add else "copy"
        last = merged[-1] if merged else None
        if span.start == span.stop:
            continue
        if last is not None and (last.peer, last.op, last.span.stop) == (peer, op, span.start):
            merged[-1] = Message(peer, Span(last.span.start, span.stop), op)
        else:
            merged.append(Message(peer, span, op))
    return tuple(merged)


# Segments received and not yet added, at most, where the schedule allows it.
WINDOW = 3

Action = Literal["send", "receive", "wait_send", "wait_receive", "add", "copy"]


class Instruction(NamedTuple):
    """One action on ``span``; ``add`` and ``copy`` take what was received aside.

    ``slot`` numbers the segment's handle. ``scratch`` is where a segment is received that will be added, or whose place
    is still to be sent: an offset into the scratch buffer; -1 for one received in place. ``tag`` is equal on both sides
    of a message.
    """

    action: Action
    span: Span
    slot: int
    peer: int = -1
    tag: int = -1
    scratch: int = -1


@dataclass
class _Flight:
    """A segment posted and not yet waited for."""

    span: Span
    slot: int
    round: int
    scratch: int = -1
    op: Op = "copy"


@dataclass
class Program:
    """The instructions of one rank, the elements of scratch they need, and what they send."""

    instructions: list[Instruction] = field(default_factory=list)
    scratch: int = 0
    elements_sent: int = 0
    messages: int = 0
    slots: int = 0


def compile_program(schedule: Schedule, numel: int, rank: int, segment: int) -> Program:
    """The program of ``rank`` for a flat tensor of ``numel`` elements in segments of at most ``segment`` elements.

    Order within a round: a segment is sent once everything received for it earlier has been added, and a receive is
    posted as soon as its place is free, thus before the previous round's receives have been waited for. Waits refer
    only to earlier positions of the peers, so programs of one schedule cannot wait for each other in a circle.
    """
    return _Compiler(rank, segment).compile(exchanges(schedule, numel, rank))


class _Compiler:
    def __init__(self, rank: int, segment: int) -> None:
        self.rank = rank
        self.segment = max(1, segment)
        self.program = Program()
        self.sending: list[_Flight] = []
        self.receiving: list[_Flight] = []
        self.tags: dict[tuple[str, int], int] = {}
        self.places: dict[int, int] = {}

    def compile(self, rounds: list[Exchange]) -> Program:
        for number, exchange in enumerate(rounds):
            self._round(number, exchange)
        while self.receiving:
            self._finish(self.receiving[0])
        while self.sending:
            self._wait_send(self.sending[0])
        return self.program

    def _round(self, number: int, exchange: Exchange) -> None:
        sends, receives = self._segments(exchange.sends), self._segments(exchange.receives)
        # With one peer either way, a message has the same place in the peer's round as in this one.
        alone = all(len({message.peer for message in way}) <= 1 for way in exchange)
        for index, (out, into) in enumerate(zip_longest(sends, receives)):
            # What is sent in a round is the value before the round: never overwrite what is sent in it.
            aside = into is not None and (into.op == "add" or any(into.span.overlaps(m.span) for m in exchange.sends))
            if into is not None and aside:
                self._receive(into, number, self._place(into, number, sends[index:], alone))
            if out is not None:
                self._send(out, number)
            if into is not None and not aside:
                self._receive(into, number)

    def _place(self, message: Message, number: int, unsent: list[Message], alone: bool) -> int:
        """Where in the scratch buffer to receive; few places in turn stay in the processor's cache. What came in this
        round is waited for only where its sender need not have got further in the round than this rank: ``alone``."""
        size = message.span.stop - message.span.start
        place = self._free_place(size)
        if place is None and len(self.places) >= WINDOW:
            for flight in [f for f in self.receiving if f.scratch >= 0]:
                # As above: what this round still has to send must not be added to before.
                if flight.round < number or (alone and not any(flight.span.overlaps(m.span) for m in unsent)):
                    self._finish(flight)
                    place = self._free_place(size)
                    break
        if place is not None:
            return place
        place = self.program.scratch
        self.places[place] = size
        self.program.scratch += size
        return place

    def _free_place(self, size: int) -> int | None:
        taken = {flight.scratch for flight in self.receiving}
        return next((place for place, length in self.places.items() if length >= size and place not in taken), None)

    def _segments(self, messages: tuple[Message, ...]) -> list[Message]:
        return [
            Message(peer, Span(start, min(start + self.segment, span.stop)), op)
            for peer, span, op in messages
            for start in range(span.start, span.stop, self.segment)
        ]

    def _send(self, message: Message, number: int) -> None:
        for flight in [f for f in self.receiving if f.round < number and f.span.overlaps(message.span)]:
            self._finish(flight)
        slot, tag = self._slot("send", message.peer)
        self.program.instructions.append(Instruction("send", message.span, slot, message.peer, tag))
        self.sending.append(_Flight(message.span, slot, number))
        self.program.elements_sent += message.span.stop - message.span.start
        self.program.messages += 1

    def _receive(self, message: Message, number: int, scratch: int = -1) -> None:
        if scratch < 0:
            for flight in [f for f in self.receiving if f.span.overlaps(message.span)]:
                self._finish(flight)
            self._free(message.span)
        slot, tag = self._slot("receive", message.peer)
        self.program.instructions.append(Instruction("receive", message.span, slot, message.peer, tag, scratch=scratch))
        self.receiving.append(_Flight(message.span, slot, number, scratch, message.op))

    def _finish(self, flight: _Flight) -> None:
        # Sums of one element are taken in the order of the rounds.
        for earlier in [f for f in self.receiving if f.slot < flight.slot and f.span.overlaps(flight.span)]:
            self._finish(earlier)
        self.receiving.remove(flight)
        self.program.instructions.append(Instruction("wait_receive", flight.span, flight.slot))
        if flight.scratch >= 0:
            self._free(flight.span)
            self.program.instructions.append(Instruction(flight.op, flight.span, flight.slot, scratch=flight.scratch))

    def _free(self, span: Span) -> None:
        for flight in [f for f in self.sending if f.span.overlaps(span)]:
            self._wait_send(flight)

    def _wait_send(self, flight: _Flight) -> None:
        self.sending.remove(flight)
        self.program.instructions.append(Instruction("wait_send", flight.span, flight.slot))

    def _slot(self, direction: str, peer: int) -> tuple[int, int]:
        tag = self.tags.get((direction, peer), 0)
        self.tags[direction, peer] = tag + 1
        self.program.slots += 1
        return self.program.slots - 1, tag
