"""Carry out a schedule on a tensor: over Gloo point to point, over NCCL natively or in batches of transfers."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from drivetrain.comm.communicator import CommunicationError, Communicator
from drivetrain.comm.program import Program, compile_program, exchanges
from drivetrain.comm.reduction import NATIVE_OPS, native
from drivetrain.comm.schedule import Schedule
from drivetrain.comm.topologies.ring import ring

# Longer messages cost less processor time, which decides where ranks share cores; shorter ones keep the receiving
# and the adding thread busy together, which decides where cores are free. See what it costs here:
# ``python -m drivetrain.bench ring --segment-mb 1,2,4,8,16,1000``.
SEGMENT_BYTES = 8 * 2**20

Plan = Callable[[torch.Tensor], None]

# What a schedule's "add" is for each operation, in place on its first argument.
COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "sum": lambda target, other: target.add_(other),
    "product": lambda target, other: target.mul_(other),
    "min": lambda target, other: torch.minimum(target, other, out=target),
    "max": lambda target, other: torch.maximum(target, other, out=target),
}


class Executor:
    """Sums tensors over the ranks of a communicator as a schedule says, in place.

    Everything that depends on the tensor's length, dtype or device is prepared at its first use and kept, receive
    buffers included. Not thread-safe: like its communicator it belongs to one thread.

    Args:
        schedule: An all-reduce for as many ranks as ``communicator`` has.
        communicator: The ranks; peers of the schedule are ranks of this group.
        segment_bytes: Longest piece sent in one message over Gloo.
        op: How two values become one: sum, product, min or max.

    Raises:
        CommunicationError: the schedule is for another number of ranks, or ``op`` is none of these.
    """

    def __init__(
        self,
        schedule: Schedule,
        communicator: Communicator,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        op: str = "sum",
    ) -> None:
        if op not in COMBINE:
            raise CommunicationError(f"a schedule knows no op {op!r}: use one of {', '.join(COMBINE)}.")
        if schedule.world_size != communicator.world_size:
            raise CommunicationError(
                f"schedule {schedule.name!r} is for {schedule.world_size} ranks but group {communicator.label!r} has "
                f"{communicator.world_size}: make the schedule with its world_size."
            )
        self.schedule = schedule
        self.communicator = communicator
        self.segment_bytes = segment_bytes
        self.op = op
        self._native = schedule.equals(ring(schedule.world_size))
        self._plans: dict[tuple[int, torch.dtype, torch.device], tuple[Plan, int, int]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace the flat contiguous ``tensor`` by its sum (or what ``op`` says) over all ranks; returns it.

        Its length need not divide by the number of chunks; all ranks must bring the same length and dtype. On CUDA
        the work is ordered on the current stream.

        Raises:
            CommunicationError: ``tensor`` is not flat and contiguous.
            RuntimeError: the transport failed, for example because a peer died.
        """
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise CommunicationError(
                f"schedule {self.schedule.name!r} runs on flat contiguous tensors, got shape {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}: pass a contiguous one-dimensional view."
            )
        statistics = self.communicator.statistics
        started = statistics.start(tensor)
        key = (tensor.numel(), tensor.dtype, tensor.device)
        prepared = self._plans.get(key)
        if prepared is None:
            prepared = self._plans[key] = self._prepare(tensor)
        plan, bytes_sent, messages = prepared
        plan(tensor)
        statistics.finish(self.schedule.name, started, bytes_sent, messages, tensor.nbytes)
        return tensor

    def _prepare(self, tensor: torch.Tensor) -> tuple[Plan, int, int]:
        numel, size = tensor.numel(), tensor.element_size()
        rank = self.communicator.rank
        if self.communicator.world_size == 1 or numel == 0:
            return _nothing, 0, 0
        if tensor.is_cuda:
            rounds = exchanges(self.schedule, numel, rank)
            sent = [message.span for exchange in rounds for message in exchange.sends]
            traffic = size * sum(span.stop - span.start for span in sent), len(sent)
            if self._native:
                return _native_plan(self.communicator, tensor, self.op), *traffic
            return _batched_plan(self.schedule, self.communicator, tensor, self.op), *traffic
        program = compile_program(self.schedule, numel, rank, max(1, self.segment_bytes // size))
        return (
            _program_plan(program, self.communicator, tensor, self.op),
            program.elements_sent * size,
            program.messages,
        )


_executors: WeakKeyDictionary[Communicator, dict[tuple[int, str], Executor]] = WeakKeyDictionary()


def run(schedule: Schedule, tensor: torch.Tensor, communicator: Communicator, op: str = "sum") -> torch.Tensor:
    """Sum the flat contiguous ``tensor`` (or do what ``op`` says) over all ranks in place, as ``schedule`` says, and
    return it.

    Keeps an :class:`Executor` per communicator and schedule object. Raises as :class:`Executor` and its call do.
    """
    executors = _executors.setdefault(communicator, {})
    # By identity: hashing a schedule costs more than a small message. The executor keeps the schedule alive.
    key = id(schedule), op
    executor = executors.get(key)
    if executor is None:
        executor = executors[key] = Executor(schedule, communicator, op=op)
    return executor(tensor)


def _nothing(tensor: torch.Tensor) -> None:
    """One rank, or no element: the sum is there already."""


def _program_plan(program: Program, communicator: Communicator, like: torch.Tensor, op: str = "sum") -> Plan:
    """The compiled program over the process group's own point-to-point calls."""
    group = communicator.group
    assert group is not None
    combine = COMBINE[op]
    scratch = torch.empty(program.scratch, dtype=like.dtype, device=like.device)
    buffers = {
        step.slot: scratch[step.scratch : step.scratch + step.span.stop - step.span.start]
        for step in program.instructions
        if step.action == "receive" and step.scratch >= 0
    }

    def plan(tensor: torch.Tensor) -> None:
        handles: list[dist.Work | None] = [None] * program.slots
        for action, (start, stop), slot, peer, tag, _ in program.instructions:
            if action == "send":
                handles[slot] = group.send([tensor[start:stop]], peer, tag)
            elif action == "receive":
                into = buffers[slot] if slot in buffers else tensor[start:stop]
                handles[slot] = group.recv([into], peer, tag)
            elif action == "add":
                combine(tensor[start:stop], buffers[slot])
            else:
                handle = handles[slot]
                assert handle is not None
                handle.wait()
                handles[slot] = None

    return plan


def _native_plan(communicator: Communicator, like: torch.Tensor, op: str = "sum") -> Plan:
    """The ring's two phases by the transport's own collectives, which are the same algorithm over better wires."""
    ranks, rank, numel = communicator.world_size, communicator.rank, like.numel()
    share = -(-numel // ranks)
    mine = slice(rank * share, (rank + 1) * share)
    group = communicator.group
    # Past the communicator, which would count this traffic a second time.
    reduce_scatter = native("reduce_scatter_single", "reduce_scatter_tensor")
    all_gather = native("all_gather_single", "all_gather_into_tensor")

    def in_place(tensor: torch.Tensor) -> None:
        reduce_scatter(tensor[mine], tensor, op=NATIVE_OPS[op], group=group)
        all_gather(tensor, tensor[mine], group=group)

    if share * ranks == numel:
        return in_place
    padded = like.new_zeros(share * ranks)

    def with_padding(tensor: torch.Tensor) -> None:
        padded[:numel].copy_(tensor)
        in_place(padded)
        tensor.copy_(padded[:numel])

    return with_padding


def _batched_plan(schedule: Schedule, communicator: Communicator, like: torch.Tensor, op: str = "sum") -> Plan:
    """Each round as one batch of transfers, for transports that would deadlock on single ones (NCCL)."""
    group = communicator.group
    combine = COMBINE[op]
    rounds = exchanges(schedule, like.numel(), communicator.rank)
    needed = [sum(message.span.stop - message.span.start for message in e.receives) for e in rounds]
    scratch = like.new_empty(max(needed, default=0))

    def plan(tensor: torch.Tensor) -> None:
        for exchange in rounds:
            operations = [
                dist.P2POp(dist.isend, tensor[span.start : span.stop], group=group, group_peer=peer)
                for peer, span, _ in exchange.sends
            ]
            arrived = []
            offset = 0
            for peer, span, action in exchange.receives:
                buffer = scratch[offset : offset + span.stop - span.start]
                offset += buffer.numel()
                operations.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer))
                arrived.append((tensor[span.start : span.stop], buffer, action))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            for target, buffer, action in arrived:
                combine(target, buffer) if action == "add" else target.copy_(buffer)

    return plan
