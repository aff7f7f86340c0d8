"""Carry out a schedule on a tensor: on CPUs message by message, through memory or over Gloo; over NCCL natively or in
batches of transfers."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch
import torch.distributed as dist

from drivetrain.comm import groups, meeting, plans
from drivetrain.comm.arguments import require_op, require_schedule
from drivetrain.comm.check import check
from drivetrain.comm.communicator import CommunicationError, Communicator
from drivetrain.comm.plans import Plan
from drivetrain.comm.program import compile_program, exchanges
from drivetrain.comm.schedule import Schedule
from drivetrain.comm.shared_memory import SLOT_BYTES, SharedMemory

# Longer messages cost less processor time, which decides where ranks share cores; shorter ones keep the receiving
# and the adding thread busy together, which decides where cores are free. See what it costs here:
# ``python -m drivetrain.bench ring --segment-mb 1,2,4,8,16,1000``.
SEGMENT_BYTES = 4 * 2**20

# Of all rounds, up to which a schedule is proved before it runs: less than a second, once.
PROVED = 2**22

# Lengths of tensors for which an executor is prepared at the same time.
KEPT = 1024

# In how many segments a plain ring runs over NCCL. More overlap its two phases, at the price of more launches and of a
# second communicator; ``python -m drivetrain.bench comm --device cuda`` shows what each number takes here.
NATIVE_SEGMENTS = 1


class Executor:
    """Runs a schedule on tensors of the ranks of a communicator, in place.

    Everything that depends on the tensor's length, dtype or device is prepared at its first use and kept, receive
    buffers included. Not thread-safe: like its communicator it belongs to one thread. All ranks end with the same bits
    where the schedule gives all the same value.

    On CPUs every message of the schedule is sent as it stands: through memory where all ranks of the communicator are
    on one host and can share it, else over Gloo. The first use finds that out, so all ranks must come to it. Over NCCL
    a ring, and a hierarchy of equal hosts, run as the transport's own reduce-scatters and all-gathers (a ring in
    segments gathers one while it reduces the next); other schedules as one batch of transfers per round.

    Args:
        schedule: For as many ranks as ``communicator`` has.
        communicator: The ranks; peers of the schedule are ranks of this group.
        segment_bytes: Longest piece sent in one message on CPUs; through memory at most a slot's.
        op: How two values become one: sum, product, min, max, or average (a sum divided by the number of ranks).
        thread_blocks: Of each operation of a ring over NCCL, which then has a group of its own; 0 leaves it to NCCL.

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
        thread_blocks: int = groups.THREAD_BLOCKS,
    ) -> None:
        require_schedule(schedule, "an executor")
        require_op(f"schedule {schedule.name!r}", op, CommunicationError)
        if schedule.world_size != communicator.world_size:
            raise CommunicationError(
                f"schedule {schedule.name!r} is for {schedule.world_size} ranks but group {communicator.label!r} has "
                f"{communicator.world_size}: make the schedule with its world_size."
            )
        self.schedule = schedule
        self.communicator = communicator
        self.segment_bytes = segment_bytes
        self.op = op
        self.thread_blocks = thread_blocks
        self._levels: tuple[list[dist.ProcessGroup], list[int]] | None = None
        self._plans: dict[tuple[int, torch.dtype, torch.device], tuple[Plan, int, int]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace the flat contiguous ``tensor`` by what the schedule makes of all ranks'; returns it.

        Its length need not divide by the number of chunks; all ranks must bring the same length and dtype. On CUDA
        the work is ordered on the current stream.

        Raises:
            CommunicationError: ``tensor`` is not flat and contiguous, or an average is asked of integers.
            RuntimeError: the transport failed, for example because a peer died; through memory a CollectiveFailed.
        """
        # Before the preparation, so that its time is counted where it is spent: at the first call.
        statistics = self.communicator.statistics
        started = statistics.start(tensor)
        key = (tensor.numel(), tensor.dtype, tensor.device)
        prepared = self._plans.get(key)
        if prepared is None or not tensor.is_contiguous() or tensor.dim() != 1 or tensor.is_conj() or tensor.is_neg():
            self._require(tensor)
            while len(self._plans) >= KEPT:
                del self._plans[next(iter(self._plans))]
            prepared = self._plans[key] = self._prepare(tensor)
        plan, bytes_sent, messages = prepared
        plan(tensor)
        statistics.finish(self.schedule.name, started, bytes_sent, messages, tensor.nbytes)
        return tensor

    def _require(self, tensor: torch.Tensor) -> None:
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise CommunicationError(
                f"schedule {self.schedule.name!r} runs on flat contiguous tensors, got shape {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}: pass a contiguous one-dimensional view."
            )
        if tensor.is_conj() or tensor.is_neg():
            raise CommunicationError(
                f"schedule {self.schedule.name!r} cannot run on a conjugate or negative view: pass its "
                "resolve_conj().resolve_neg()."
            )
        if self.op == "average" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise CommunicationError(f"the average of {tensor.dtype} is not exact: use op='sum', or a float tensor.")

    def _prepare(self, tensor: torch.Tensor) -> tuple[Plan, int, int]:
        comm, numel, size = self.communicator, tensor.numel(), tensor.element_size()
        if comm.world_size == 1 or numel == 0:
            return plans.nothing, 0, 0
        op = "sum" if self.op == "average" else self.op
        assert comm.group is not None
        if tensor.is_cuda:
            sent = [message.span for each in exchanges(self.schedule, numel, comm.rank) for message in each.sends]
            traffic = size * sum(span.stop - span.start for span in sent), len(sent)
            plan = self._device_plan(comm.group, tensor, op)
        else:
            links = shared(comm)
            longest = self.segment_bytes if links is None else min(self.segment_bytes, SLOT_BYTES)
            program = compile_program(self.schedule, numel, comm.rank, max(1, longest // size))
            traffic = program.elements_sent * size, program.messages
            scratch = self._room(program.scratch * size).view(tensor.dtype)
            if links is not None:
                plan = plans.shared_plan(program, comm.rank, links, tensor, op, self.schedule, scratch)
            else:
                plan = plans.program_plan(program, comm.rank, comm.group, tensor, op, scratch)
        if self.op == "average":
            plan = _averaging(plan, comm.world_size, early=tensor.dtype == torch.float16)
        return plan, *traffic

    def _room(self, nbytes: int) -> torch.Tensor:
        """Memory for what a plan receives aside. One plan runs at a time, so all have the same; it doubles where it is
        too small, so that lengths without end cost no more than the longest of them."""
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(1 << (nbytes - 1).bit_length(), dtype=torch.uint8)
        return self._scratch[:nbytes]

    def _device_plan(self, group: dist.ProcessGroup, tensor: torch.Tensor, op: str) -> Plan:
        parts = plans.ring_parts(self.schedule)
        if parts == 1:
            parts = NATIVE_SEGMENTS
        if parts is not None and parts > 1:
            return plans.overlapped_plan(group, another_group(self.communicator, "gathering", 0), tensor, op, parts)
        levels = self._groups()
        if levels is None:
            return plans.batched_plan(self.schedule, self.communicator.rank, group, tensor, op)
        return plans.native_plan(*levels, group, tensor, op)

    def _groups(self) -> tuple[list[dist.ProcessGroup], list[int]] | None:
        """This rank's process group, and number in it, for each level that the transport can run; made once."""
        if self._levels is None:
            levels = plans.native_levels(self.schedule)
            if levels is None:
                return None
            self._levels = self._meet(levels)
        return self._levels

    def _ring_group(self) -> dist.ProcessGroup:
        comm = self.communicator
        assert comm.group is not None
        if self.thread_blocks == comm.thread_blocks or not groups.tunable(comm, self.thread_blocks):
            return comm.group
        return another_group(comm, "ring", self.thread_blocks)

    def _meet(self, levels: list[int]) -> tuple[list[dist.ProcessGroup], list[int]]:
        comm = self.communicator
        if len([level for level in levels if level > 1]) <= 1:
            return [self._ring_group()], [comm.rank]
        parts, places = [], []
        for number, level in enumerate(levels):
            if level == 1:
                continue
            stride = math.prod(levels[:number])
            color = comm.rank // (stride * level) * stride + comm.rank % stride
            child = comm.split(color, label=f"{comm.label}, level {number}")
            assert child is not None and child.group is not None
            parts.append(child.group)
            places.append(child.rank)
        return parts, places


def _averaging(plan: Plan, ranks: int, *, early: bool) -> Plan:
    """Sums divided by the number of ranks; ``early`` divides before, where sums could leave the range of float16."""

    def averaged(tensor: torch.Tensor) -> None:
        if early:
            tensor.div_(ranks)
        plan(tensor)
        if not early:
            tensor.div_(ranks)

    return averaged


_others: WeakKeyDictionary[Communicator, dict[tuple[str, int], dist.ProcessGroup]] = WeakKeyDictionary()


def another_group(communicator: Communicator, purpose: str, thread_blocks: int) -> dist.ProcessGroup:
    """Another process group of the same ranks, whose operations do not wait for those of the first; made once for each
    ``purpose`` and number of thread blocks, so all ranks must ask at the same point."""
    made = _others.setdefault(communicator, {})
    key = purpose, thread_blocks
    if key not in made:
        made[key] = groups.again(communicator, f"{communicator.label}, {purpose}", thread_blocks)
    return made[key]


_met: WeakSet[Communicator] = WeakSet()


def shared(communicator: Communicator) -> SharedMemory | None:
    """This rank's links through shared memory, None where ranks are on several hosts or cannot share any; made at the
    first use, so all ranks must ask at the same point."""
    if communicator not in _met and communicator.group is not None:
        communicator.links = meeting.meet(communicator)
        _met.add(communicator)
        if communicator.links is not None:
            finalize(communicator, communicator.links.close)
    return communicator.links


def run(schedule: Schedule, tensor: torch.Tensor, communicator: Communicator, op: str = "sum") -> torch.Tensor:
    """Replace the flat contiguous ``tensor`` by its sum (or what ``op`` says) over all ranks as ``schedule`` says;
    returns it.

    Keeps an :class:`Executor` per communicator, schedule object and op. A schedule that anybody may have made is proved
    at its first use, but for one of more than ``PROVED`` messages, on which ``python -m drivetrain.comm verify`` spends
    the time.

    Raises:
        ScheduleError: the schedule is wrong; before anything is sent, on every rank.
        CommunicationError, RuntimeError: as :class:`Executor` and its call raise them.
    """
    # By identity: hashing a schedule costs more than a small message. The executor keeps the schedule alive.
    key = id(schedule), op
    executor = communicator.executors.get(key)
    if executor is None:
        if len(require_schedule(schedule, "an executor").rounds) * schedule.world_size <= PROVED:
            check(schedule)
        executor = communicator.executors[key] = Executor(schedule, communicator, op=op)
    return executor(tensor)
