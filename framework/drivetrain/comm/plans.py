"""How a schedule runs over a transport: message by message, in batches, or by the transport's own collectives.

A plan is a function of the tensor, made once for its length, dtype and device. Everything that can be decided ahead is:
what is left is a loop over transport calls and additions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from drivetrain.comm.point_to_point import SCHEDULE_TAGS
from drivetrain.comm.program import Program, Span, exchanges
from drivetrain.comm.reduction import NATIVE_OPS, native
from drivetrain.comm.schedule import Schedule
from drivetrain.comm.shared_memory import SharedMemory
from drivetrain.comm.topologies.hierarchical import hierarchical
from drivetrain.comm.topologies.ring import ring

Plan = Callable[[torch.Tensor], None]

ALIGNMENT = 128  # bytes: what devices copy at once

# What a schedule's "add" is for each operation: called with both values and ``out``.
COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def nothing(tensor: torch.Tensor) -> None:
    """One rank, or no element: the result is there already."""


# -- message by message ---------------------------------------------------------------------------------------------
_SEND, _RECEIVE, _RECEIVE_ASIDE, _WAIT, _COPY, _FIRST, _SECOND = range(7)


def program_plan(
    program: Program, rank: int, group: dist.ProcessGroup, like: torch.Tensor, op: str, scratch: torch.Tensor
) -> Plan:
    """The compiled program over the process group's own point-to-point calls. ``scratch`` has as many elements as the
    program asks for."""
    combine, send, receive = COMBINE[op], group.send, group.recv
    spans: dict[Span, int] = {}
    asides: dict[int, torch.Tensor] = {}
    peers: dict[int, int] = {}
    steps = []
    for action, span, slot, peer, tag, offset in program.instructions:
        place = spans.setdefault(span, len(spans))
        code = _WAIT
        if action == "send":
            code = _SEND
        elif action == "receive":
            code, peers[slot] = _RECEIVE, peer
            if offset >= 0:
                code, asides[slot] = _RECEIVE_ASIDE, scratch[offset : offset + span.stop - span.start]
        elif action == "add":
            # Both sides of an exchange take the lower rank's value first: which zero or NaN comes out of a minimum
            # depends on the order, and all ranks are to end with the same bits.
            code = _FIRST if rank < peers[slot] else _SECOND
        elif action == "copy":
            code = _COPY
        steps.append((code, place, slot, peer, SCHEDULE_TAGS + tag, asides.get(slot, scratch)))
    cuts, numel, slots = list(spans), like.numel(), program.slots

    def plan(tensor: torch.Tensor) -> None:
        views = [tensor if stop - start == numel else tensor[start:stop] for start, stop in cuts]
        handles: list[dist.Work | None] = [None] * slots
        for code, place, slot, peer, tag, aside in steps:
            if code == _WAIT:
                handles[slot].wait()  # type: ignore[union-attr]
                handles[slot] = None
            elif code == _SEND:
                handles[slot] = send([views[place]], peer, tag)
            elif code == _RECEIVE_ASIDE:
                handles[slot] = receive([aside], peer, tag)
            elif code == _RECEIVE:
                handles[slot] = receive([views[place]], peer, tag)
            elif code == _COPY:
                views[place].copy_(aside)
            else:
                _combine(combine, views[place], aside, code == _FIRST)

    return plan


# -- through shared memory --------------------------------------------------------------------------------------------
_TAKE_FIRST, _TAKE_SECOND = range(_SECOND + 1, _SECOND + 3)


def shared_plan(
    program: Program,
    rank: int,
    memory: SharedMemory,
    like: torch.Tensor,
    op: str,
    schedule: Schedule,
    scratch: torch.Tensor,
) -> Plan:
    """The compiled program of ``schedule`` through memory that the ranks share. What is added at once is added out of
    the peer's slot; what must wait until something else is sent is copied aside, so that the slot is free for what
    follows."""
    how = f"in {len(schedule.rounds)} rounds of {schedule.chunks} chunks by {schedule.name}"
    what = f"{op} of {like.numel()} {str(like.dtype).removeprefix('torch.')} {how}".encode()
    combine, links = COMBINE[op], memory.links
    spans: dict[Span, int] = {}
    peers: dict[int, int] = {}
    asides: dict[int, torch.Tensor] = {}
    steps = []
    waiting = None  # the message that the instruction before waits for
    for action, span, slot, peer, _, offset in program.instructions:
        place = spans.setdefault(span, len(spans))
        if peer >= 0:
            peers[slot] = peer
        if action == "receive" and offset >= 0:
            asides[slot] = scratch[offset : offset + span.stop - span.start]
        code = {"send": _SEND, "receive": _RECEIVE_ASIDE if slot in asides else _RECEIVE}.get(action, _WAIT)
        if action == "add":
            # As above: both sides of an exchange take the lower rank's value first.
            code = _FIRST if rank < peers[slot] else _SECOND
            if waiting == slot:
                steps.pop()
                code = _TAKE_FIRST if code == _FIRST else _TAKE_SECOND
        elif action == "copy":
            code = _COPY
        waiting = slot if action == "wait_receive" else None
        steps.append((code, place, slot, links[peers[slot]], asides.get(slot, scratch)))
    cuts, slots = list(spans), program.slots

    def run(tensor: torch.Tensor) -> None:
        views = [tensor[start:stop] for start, stop in cuts]
        done = [False] * slots
        for code, place, slot, link, aside in steps:
            if code == _SEND:
                if link.free and not link.sends:
                    link.fill(views[place])
                    done[slot] = True
                else:
                    link.sends.append((slot, views[place]))
            elif code == _RECEIVE:
                link.receives.append((slot, views[place]))
            elif code == _RECEIVE_ASIDE:
                link.receives.append((slot, aside))
            elif code == _WAIT:
                while not done[slot]:
                    memory.progress(done)
                    if not done[slot]:
                        memory.wait(link)
            elif code == _COPY:
                views[place].copy_(aside)
            elif code in (_FIRST, _SECOND):
                _combine(combine, views[place], aside, code == _FIRST)
            else:
                while not done[slot]:
                    memory.progress(done, until=slot)
                    if link.arrived and link.receives and link.receives[0][0] == slot:
                        break
                    if not done[slot]:
                        memory.wait(link)
                if done[slot]:
                    _combine(combine, views[place], aside, code == _TAKE_FIRST)
                else:
                    _combine(combine, views[place], link.message(aside), code == _TAKE_FIRST)
                    link.receives.popleft()
                    link.release()

    # Of any tensor, also one with a gradient's history or made for inference, only the values travel.
    @torch.inference_mode()
    def plan(tensor: torch.Tensor) -> None:
        memory.require_whole()
        memory.begin(what)
        try:
            run(tensor)
        except BaseException:
            memory.fail()
            raise

    return plan


def _combine(combine: Callable[..., torch.Tensor], mine: torch.Tensor, other: torch.Tensor, first: bool) -> None:
    if first:
        combine(mine, other, out=mine)
    else:
        combine(other, mine, out=mine)


# -- in batches -----------------------------------------------------------------------------------------------------
def batched_plan(schedule: Schedule, rank: int, group: dist.ProcessGroup, like: torch.Tensor, op: str) -> Plan:
    """Each round as one batch of transfers, for transports that would deadlock on single ones (NCCL)."""
    combine = COMBINE[op]
    rounds = exchanges(schedule, like.numel(), rank)
    prepared = []
    needed = 0
    for exchange in rounds:
        sends = [(message.peer, message.span) for message in exchange.sends]
        receives: list[tuple[int, Span, int, str]] = []
        offset = 0
        for peer, span, action in exchange.receives:
            # What is sent in a round is the value before the round.
            if action == "copy" and not any(span.overlaps(sent) for _, sent in sends):
                receives.append((peer, span, -1, action))
                continue
            receives.append((peer, span, offset, action))
            offset += span.stop - span.start
        needed = max(needed, offset)
        if sends or receives:
            prepared.append((sends, receives))
    scratch = like.new_empty(needed)

    def plan(tensor: torch.Tensor) -> None:
        for sends, receives in prepared:
            operations = [
                dist.P2POp(dist.isend, tensor[start:stop], group=group, group_peer=peer)
                for peer, (start, stop) in sends
            ]
            arrived = []
            for peer, (start, stop), offset, action in receives:
                target = tensor[start:stop]
                into = target if offset < 0 else scratch[offset : offset + stop - start]
                operations.append(dist.P2POp(dist.irecv, into, group=group, group_peer=peer))
                if offset >= 0:
                    arrived.append((target, into, action, peer))
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            for target, into, action, peer in arrived:
                if action == "copy":
                    target.copy_(into)
                elif rank < peer:
                    combine(target, into, out=target)
                else:
                    combine(into, target, out=target)

    return plan


# -- by the transport's own collectives -------------------------------------------------------------------------------
def native_levels(schedule: Schedule) -> list[int] | None:
    """How many ranks share each level where ``schedule`` is a ring (one level) or a hierarchy of equal rings, whose
    phases are reduce-scatters and all-gathers of groups; None for any other schedule."""
    size = schedule.world_size
    if schedule.name == "ring" and len(schedule.rounds) == 2 * (size - 1):
        return [size] if schedule.equals(ring(size)) else None
    if schedule.name != "hierarchical":
        return None
    rounds: dict[str, int] = {}
    for phase in schedule.phases:
        rounds[phase] = rounds.get(phase, 0) + 1
    depth = max((int(phase.rpartition("_")[2]) for phase in rounds), default=-1) + 1
    levels = [rounds.get(f"reduce_scatter_{level}", 0) + 1 for level in range(depth)]
    product = 1
    for level in levels:
        product *= level
    if product != size or not schedule.equals(hierarchical(size, levels=levels)):
        return None
    return levels


def ring_parts(schedule: Schedule) -> int | None:
    """In how many segments ``schedule`` is the all-reduce of a ring; None for any other schedule."""
    size = schedule.world_size
    if schedule.name != "ring" or schedule.chunks % size:
        return None
    segments = schedule.chunks // size
    if len(schedule.rounds) != 2 * (size - 1) * segments:
        return None
    return segments if schedule.equals(ring(size, segments)) else None


def grid_groups(levels: Sequence[int]) -> list[list[list[int]]]:
    """For each level the groups of ranks that share it, where ranks of the first level follow each other."""
    size = 1
    for level in levels:
        size *= level
    found, stride = [], 1
    for level in levels:
        starts = [rank for rank in range(size) if rank // stride % level == 0]
        found.append([[start + stride * i for i in range(level)] for start in starts])
        stride *= level
    return found


def native_plan(
    groups: Sequence[dist.ProcessGroup], places: Sequence[int], world: dist.ProcessGroup, like: torch.Tensor, op: str
) -> Plan:
    """A reduce-scatter per level, an all-reduce at the outermost where there are several, and the all-gathers back.

    The transport's own phases are the same algorithm over better wires. They work in the tensor itself; the few
    elements that do not divide by the number of ranks take an all-reduce of their own, which costs less than moving
    everything.

    Args:
        groups: this rank's process group of each level.
        places: this rank's number in each.
        world: the group of all ranks.
        like: of the length, dtype and device of the tensors to come.
        op: sum, product, min or max.
    """
    reduce_op = NATIVE_OPS[op]
    reduce_scatter = native("reduce_scatter_single", "reduce_scatter_tensor")
    all_gather = native("all_gather_single", "all_gather_into_tensor")
    sizes = [group.size() for group in groups]
    divisor = world.size()
    even = like.numel() // divisor * divisor
    halves = groups if len(groups) == 1 else groups[:-1]
    spans, start, length = [Span(0, even)], 0, even
    for place, size in zip(places, sizes, strict=True):
        length //= size
        start += place * length
        spans.append(Span(start, start + length))
    spans = spans[: len(halves) + 1]
    outermost = None if len(groups) == 1 else groups[-1]

    def plan(tensor: torch.Tensor) -> None:
        if even:
            parts = [tensor[start:stop] for start, stop in spans]
            for group, whole, mine in zip(halves, parts, parts[1:], strict=False):
                reduce_scatter(mine, whole, op=reduce_op, group=group)
            if outermost is not None:
                dist.all_reduce(parts[-1], op=reduce_op, group=outermost)
            for group, whole, mine in reversed(list(zip(halves, parts, parts[1:], strict=False))):
                all_gather(whole, mine, group=group)
        if even < tensor.numel():
            dist.all_reduce(tensor[even:], op=reduce_op, group=world)

    return plan


def overlapped_plan(
    scatter: dist.ProcessGroup, gather: dist.ProcessGroup, like: torch.Tensor, op: str, parts: int
) -> Plan:
    """A ring in segments: the tensor in ``parts`` pieces, each reduce-scattered, then gathered.

    The two phases run on process groups of their own, so that a piece is gathered while the next is reduced. All of it
    happens in the tensor itself, and on a device the host waits for nothing: every wait is one of streams.

    Args:
        scatter: all ranks; its operations follow each other, and so do those of ``gather``.
        gather: the same ranks in the same order, another group.
        like: of the length, dtype and device of the tensors to come.
        op: sum, product, min or max.
        parts: how many pieces, of equal length but for the alignment of the cuts.
    """
    reduce_op = NATIVE_OPS[op]
    reduce_scatter = native("reduce_scatter_single", "reduce_scatter_tensor")
    all_gather = native("all_gather_single", "all_gather_into_tensor")
    size, place = scatter.size(), scatter.rank()
    share = like.numel() // size
    even = share * size
    cuts = aligned_cuts(share, parts, max(1, ALIGNMENT // like.element_size()))
    # Each piece with the part of it that this rank reduces.
    spans = [
        (
            Span(size * start, size * stop),
            Span(size * start + place * (stop - start), size * start + (place + 1) * (stop - start)),
        )
        for start, stop in pairwise(cuts)
    ]

    def plan(tensor: torch.Tensor) -> None:
        views = [(tensor[slice(*whole)], tensor[slice(*mine)]) for whole, mine in spans]

        def reduced(number: int) -> dist.Work:
            whole, mine = views[number]
            return reduce_scatter(mine, whole, op=reduce_op, group=scatter, async_op=True)

        works = []
        # Posted before the wait for the piece before it, where that wait may hold up the host.
        coming = reduced(0) if views else None
        for number, (whole, mine) in enumerate(views):
            current, coming = coming, reduced(number + 1) if number + 1 < len(views) else None
            assert current is not None
            current.wait()
            works.append(all_gather(whole, mine, group=gather, async_op=True))
        if even < tensor.numel():
            works.append(dist.all_reduce(tensor[even:], op=reduce_op, group=scatter, async_op=True))
        for work in works:
            work.wait()

    return plan


def aligned_cuts(length: int, parts: int, alignment: int) -> list[int]:
    """Where to cut ``length`` elements into at most ``parts`` nearly equal pieces, none empty, at multiples of
    ``alignment``: from 0 to ``length``."""
    inner = {length * part // parts // alignment * alignment for part in range(1, parts)}
    return sorted({0, *inner, length})
