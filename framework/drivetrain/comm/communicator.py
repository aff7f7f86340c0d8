"""A group of ranks that can talk to each other: what torch's process groups offer, completed, counted and explained.

Every operation takes tensors, numpy arrays and lists of them: strided, 0-d and empty ones too, and of any size. What
is promised "in place" lands in the caller's own storage. Results are of the kind that was given. A tensor that lies
on another kind of device than the group's transport uses (``device``) travels by a copy there.

Shape, dtype and operation must agree between ranks as each operation says. Nothing is exchanged to make sure of it,
unless a communicator is made with ``check=True`` (or ``DRIVETRAIN_CHECK_COLLECTIVES=1`` is set): then every collective
begins with an exchange of what each rank is about to do, and a difference is the same error on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from drivetrain.comm import arrival, collectives, groups, plain, point_to_point, reduction
from drivetrain.comm.any_source import Arrivals
from drivetrain.comm.arguments import is_whole
from drivetrain.comm.choice import schedule_of
from drivetrain.comm.failures import CollectiveFailed, CommunicationError, PeerLost, alone, explained
from drivetrain.comm.groups import ByHost
from drivetrain.comm.point_to_point import ABORT_TAG, FIRST_OWN_TAG, Handle
from drivetrain.comm.reduction import ReduceOp
from drivetrain.comm.schedule import Schedule
from drivetrain.comm.shared_memory import SharedMemory
from drivetrain.comm.statistics import Statistics

if TYPE_CHECKING:
    from drivetrain.comm.execute import Executor

__all__ = ["ByHost", "CollectiveFailed", "CommunicationError", "Communicator", "Handle", "PeerLost", "ReduceOp"]

Algorithm = Literal["auto", "native", "ring", "tree", "halving_doubling", "recursive_doubling", "hierarchical"]
CHECK = "DRIVETRAIN_CHECK_COLLECTIVES"


class Communicator:
    """The ranks of one torch process group; with one rank it needs no process group and every collective is identity.

    Peers are ranks of this group, never of the job. One communicator belongs to one thread: concurrent work takes
    communicators of its own, made with :meth:`sub` or :meth:`split`.

    Args:
        group: The process group, or None for a world of one rank.
        device: Where data is put to be sent: ``cpu`` for Gloo, this rank's GPU for NCCL.
        label: Name of the group in error messages.
        check: Have ranks compare what they are about to do before each collective; None asks the environment variable
            ``DRIVETRAIN_CHECK_COLLECTIVES``. Must be equal on all ranks.
        timeout: How long a collective of a group made from this one may take; None is torch's default.

    Attributes:
        last_source: the rank that the latest message of :meth:`recv` or :meth:`recv_object` came from.
        statistics: what this rank sent.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        label: str = "world",
        check: bool | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise CommunicationError(
                f"group {label!r} is {group!r}, no process group that this rank is in: pass one of "
                "torch.distributed's, or None for a world of one rank."
            )
        if timeout is not None and not isinstance(timeout, timedelta):
            raise CommunicationError(
                f"group {label!r} got timeout={timeout!r}: pass a timedelta, such as timedelta(seconds=60), or None."
            )
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise CommunicationError(
                f"group {label!r} got device={device!r}: pass 'cpu', 'cuda' or 'cuda:0'."
            ) from error
        self.group = group
        self.timeout = timeout
        self.label = label
        self.rank: int = 0 if group is None else group.rank()
        self.world_size: int = 1 if group is None else group.size()
        self.check = os.environ.get(CHECK, "0") not in ("", "0") if check is None else check
        self.statistics = Statistics(label, self.world_size)
        self.arrivals = Arrivals(self)
        self.entered = RLock()  # by the thread whose operation of all ranks is under way
        self.last_source: int | None = None
        self.barriers = 0
        self.links: SharedMemory | None = None  # where schedules send through memory
        self.executors: dict[tuple[int, str], Executor] = {}  # kept here, they end with this object, which they know
        self.thread_blocks = 0  # that were asked of NCCL for each operation of the group
        self._schedules: dict[str, Schedule] = {}

    def __getstate__(self) -> dict[str, Any]:
        """All but the lock, which is of this process: a communicator of one rank travels with what holds it."""
        return {name: value for name, value in self.__dict__.items() if name != "entered"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, entered=RLock())

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0 of the group."""
        return self.rank == 0

    # -- point to point -----------------------------------------------------------------------------------------
    @explained
    def isend(self, tensor: Any, destination: int, tag: int = 0) -> Handle:
        """Start sending ``tensor``; it must not change before ``wait`` returns.

        Raises:
            CommunicationError: ``destination`` is this rank or no rank of the group, or ``tag`` is not from 0 to
                2**29 - 1. ``wait`` raises :class:`PeerLost` where the destination is gone.
        """
        return point_to_point.isend(self, tensor, destination, self._tag(tag))

    @explained
    def irecv(self, tensor: Any, source: int, tag: int = 0) -> Handle:
        """Start receiving into ``tensor``, in place, from ``source``. Raises as :meth:`isend`."""
        return point_to_point.irecv(self, tensor, source, self._tag(tag))

    @explained
    def send(self, tensor: Any, destination: int, tag: int = 0) -> None:
        """Send ``tensor`` and wait until it may change again; a list is sent one by one. Raises as :meth:`isend`."""
        point_to_point.send(self, tensor, destination, self._tag(tag))

    @explained
    def recv(self, tensor: Any, source: int | None = None, tag: int = 0) -> Any:
        """Receive into ``tensor``, of the sender's size and dtype, in place; returns it.

        ``source=None`` takes the next message of any rank, whose number is then in ``last_source``: one receive for
        each rank waits in a thread of its own, so messages of one tag must be of one size. Gloo only.

        Raises:
            PeerLost: the source is gone; when receiving from any, a rank is gone (once for each).
            CommunicationError: as :meth:`isend`; or nobody can be heard from any more.
        """
        return point_to_point.recv(self, tensor, source, self._tag(tag))

    # -- collectives that move ----------------------------------------------------------------------------------
    @alone
    def broadcast(self, tensor: Any, source: int = 0) -> Any:
        """Overwrite ``tensor`` on every rank with that of ``source``, in place; returns it."""
        return collectives.broadcast(self, tensor, source)

    @alone
    def scatter(self, parts: Any = None, source: int = 0, output: Any = None) -> Any:
        """This rank's part of what ``source`` has: a list with one tensor for each rank, of any shapes, or a tensor
        whose rows are cut as evenly as can be. The other ranks pass nothing: shapes travel ahead of the parts.

        Args:
            parts: on ``source`` what is scattered.
            source: whose.
            output: where to put the part, in place; None makes a new tensor.
        """
        return collectives.scatter(self, parts, source, output)

    @alone
    def gather(self, tensor: Any, destination: int = 0, *, uneven: bool = False) -> list[Any] | None:
        """The tensors of all ranks in rank order on ``destination``; None on the others. Equal in shape and dtype, or
        ``uneven``, which sends each one's shape ahead."""
        return collectives.gather(self, tensor, destination, uneven)

    @alone
    def all_gather(self, tensor: Any, *, uneven: bool = False, sizes: Sequence[int] | None = None) -> list[Any]:
        """The tensors of all ranks in rank order, on every rank.

        Shape and dtype must be equal on all, unless every rank says ``uneven`` (shapes are gathered first), or gives
        as ``sizes`` the first dimension of each rank's tensor (nothing more is exchanged).
        """
        return collectives.all_gather(self, tensor, uneven, sizes)

    @alone
    def all_to_all(self, parts: Any, *, uneven: bool = False) -> Any:
        """Part i of ``parts`` goes to rank i; returns what all ranks had for this one, in rank order.

        A list of tensors comes back as a list. A tensor's rows are cut as evenly as can be, and what arrives is joined
        along the rows. Parts must be equal in shape on all ranks, unless every rank says ``uneven``.
        """
        return collectives.all_to_all(self, parts, uneven)

    # -- collectives that compute -------------------------------------------------------------------------------
    @alone
    def all_reduce(self, tensor: Any, op: ReduceOp = "sum", algorithm: Algorithm | str | Schedule = "auto") -> Any:
        """Combine ``tensor`` over all ranks, in place on every rank; returns it. What happens to integers and bools
        is in :mod:`drivetrain.comm.reduction`: a sum that does not fit is returned as a new int64 tensor.

        Args:
            tensor: equal in shape and dtype on all ranks. A list is combined in one message for each dtype.
            op: sum, average, min, max or product.
            algorithm: ``"native"`` is the transport's own, ``"auto"`` the one expected to be fastest; else the name of
                a registered topology, or a schedule (one that knows this group's hosts, say), equal on all ranks.

        Raises:
            CommunicationError: ``op`` is unknown or not defined for the dtype; a result is beyond int64.
            ConfigurationError: no topology is called ``algorithm``.
        """
        return reduction.all_reduce(self, tensor, op, algorithm)

    def ring_all_reduce(self, tensor: Any, op: ReduceOp = "sum") -> Any:
        """:meth:`all_reduce` around a ring (Patarasu and Yuan, 2009): the least bytes per rank."""
        return self.all_reduce(tensor, op, "ring")

    def tree_all_reduce(self, tensor: Any, op: ReduceOp = "sum") -> Any:
        """:meth:`all_reduce` up and down a binomial tree: few rounds."""
        return self.all_reduce(tensor, op, "tree")

    @alone
    def reduce(self, tensor: Any, destination: int = 0, op: ReduceOp = "sum") -> Any:
        """Combine ``tensor`` over all ranks, in place on ``destination``, which gets it back; None on the others,
        whose tensor stays as it is. Rules and errors as of :meth:`all_reduce`."""
        return reduction.reduce(self, tensor, destination, op)

    @alone
    def reduce_scatter(self, parts: Any, op: ReduceOp = "sum", *, sizes: Sequence[int] | None = None) -> Any:
        """Combine over all ranks and keep this rank's part, a new tensor. Integers come back as int64.

        Args:
            parts: equal on all ranks in shape and dtype: a list with one tensor for each rank, or a tensor whose rows
                are cut as evenly as can be.
            op: as :meth:`all_reduce` takes it.
            sizes: how many rows each rank keeps of a tensor, where they are not cut evenly.
        """
        return reduction.reduce_scatter(self, parts, op, sizes)

    @alone
    def all_gather_flat(self, output: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Fill ``output``, of ``world_size * tensor.numel()`` elements, with the tensors of all ranks; returns it."""
        return collectives.all_gather_flat(self, output, tensor)

    @alone
    def reduce_scatter_flat(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Combine ``tensor``, of ``world_size * output.numel()`` elements, in its own dtype; rank r keeps the r-th part
        in ``output``."""
        return reduction.reduce_scatter_flat(self, output, tensor, op)

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every rank is here.

        Args:
            timeout: Seconds to wait; None is the timeout of the process group. After a timeout the group is unusable.

        Raises:
            CommunicationError: ranks did not arrive in time, or died; names them, on every rank that waited. Or
                ``timeout`` is no number above zero.
        """
        arrival.barrier(self, timeout)

    # -- plain data ---------------------------------------------------------------------------------------------
    @alone
    def gather_plain(self, data: Any, destination: int = 0) -> list[Any] | None:
        """The plain ``data`` of all ranks in rank order on ``destination``; None on the others.

        Plain is what JSON can hold; it travels as JSON, never as a pickle, so tuples come back as lists and keys as
        strings.

        Raises:
            CommunicationError: the data of some rank is not plain; raised on every rank, naming those.
        """
        gathered = plain.gather_json(self, data, destination)
        return gathered if self.rank == destination else None

    @alone
    def all_gather_plain(self, data: Any) -> list[Any]:
        """The plain ``data`` of all ranks in rank order, on every rank. Plain and errors as in :meth:`gather_plain`."""
        return plain.gather_json(self, data, None)

    def send_object(self, data: Any, destination: int, tag: int = 0) -> None:
        """Send plain ``data``: None, bools, numbers, text, tensors and numpy arrays, in lists, tuples and dicts. It
        travels as JSON and raw numbers, never as a pickle, and comes back as it was; tensors on the CPU.

        Raises:
            CommunicationError: the data is not plain (says what and where), or as :meth:`isend`; ``tag`` up to
                2**27 - 1.
        """
        plain.send_object(self, data, destination, tag)

    def recv_object(self, source: int | None = None, tag: int = 0) -> Any:
        """What a rank sent with :meth:`send_object`; ``source=None`` takes the next of any rank, whose number is then
        in ``last_source``. Raises as :meth:`recv`."""
        return plain.recv_object(self, source, tag)

    @alone
    def broadcast_object(self, data: Any = None, source: int = 0) -> Any:
        """The plain ``data`` (see :meth:`send_object`) of ``source``, on every rank. Data that is not plain is an error
        on every rank."""
        return plain.broadcast_object(self, data, source)

    @alone
    def gather_object(self, data: Any, destination: int = 0) -> list[Any] | None:
        """The plain ``data`` of all ranks in rank order on ``destination``; None on the others. Errors everywhere."""
        gathered = plain.gather_objects(self, data, destination)
        return gathered if self.rank == destination else None

    @alone
    def all_gather_object(self, data: Any) -> list[Any]:
        """The plain ``data`` of all ranks in rank order, on every rank. Errors everywhere."""
        return plain.gather_objects(self, data, None)

    @alone
    def scatter_object(self, parts: Sequence[Any] | None = None, source: int = 0) -> Any:
        """This rank's element of the list that ``source`` has. Errors everywhere."""
        return plain.scatter_objects(self, parts, source)

    # -- groups -------------------------------------------------------------------------------------------------
    @alone
    def sub(self, ranks: Sequence[int], label: str) -> Communicator | None:
        """A communicator of its own for ``ranks``, rising ranks of this group, renumbered from 0.

        Every rank of the *job* must make the same call in the same order, as torch requires of new groups. Returns
        None on ranks that are not in ``ranks``. Statistics start at zero.

        Raises:
            CommunicationError: ``ranks`` is empty, not rising, or names a rank that is not in this group.
        """
        return groups.sub(self, ranks, label)

    @alone
    def split(self, color: int | None, key: int | None = None, label: str = "color") -> Communicator | None:
        """Part this group: ranks that give the same ``color`` form a group, ordered by ``key`` (then by rank), which is
        the rank unless given. ``None`` as colour joins no group and returns None.

        Only the ranks of *this* group call it, all of them; others of the job need not know.

        Raises:
            CommunicationError: some rank's ``color`` or ``key`` is not a whole number; on every rank.
        """
        return groups.split(self, color, key, label)

    @alone
    def by_host(self, host: str | None = None) -> ByHost:
        """Part this group by host. Only the ranks of this group call it, all of them.

        Args:
            host: what this rank's host is called; None takes the launcher's number of it, else the machine's name.

        Returns:
            ``(inside, between, hosts)``: the ranks of this rank's host; the ranks of all hosts with this rank's number
            inside its own; the number of the host of each rank.
        """
        return groups.by_host(self, host)

    def child(self, group: dist.ProcessGroup | None, label: str, thread_blocks: int = 0) -> Communicator:
        """A communicator of ``group``, profiled and reported with this one."""
        made = Communicator(group, self.device, label, self.check, self.timeout)
        made.thread_blocks = thread_blocks
        self.statistics.adopt(made.statistics, made)
        return made

    def knows(self, name: str) -> bool:
        """Whether the schedule of topology ``name`` was made for this group already."""
        return name in self._schedules

    def schedule(self, name: str) -> Schedule:
        """The schedule of topology ``name`` for this group, kept. Raises ConfigurationError for an unknown name."""
        if name not in self._schedules:
            self._schedules[name] = schedule_of(name, self)
        return self._schedules[name]

    # -- traffic ------------------------------------------------------------------------------------------------
    def enable_profiling(self) -> None:
        """Count by phase of training too, and time devices: here and in the groups made from this communicator."""
        self.statistics.enable()

    def disable_profiling(self) -> None:
        """Count totals only again; what was counted by phase stays."""
        self.statistics.enable(False)

    def stats(self) -> dict[str, Any]:
        """What this rank sent through this communicator and the groups made from it, as plain data.

        ``bytes_sent``, ``messages``, ``seconds``; ``operations``: for each ``calls``, these three, and
        ``algorithm_bandwidth`` and ``bus_bandwidth`` in bytes per second as nccl-tests define them; ``phases``: the
        same for each phase (forward, backward, optimizer, boundary, evaluation, checkpoint, setup) that was profiled;
        ``groups``: totals by label.
        """
        return self.statistics.stats()

    # -- the end ------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """End the threads that receive from any rank; never a collective. Call it when this group has no more work:
        where a receive still waits, the group is broken by :meth:`abort`."""
        if self.arrivals.close():
            self.abort()
        self.arrivals.join()

    def abort(self) -> None:
        """Break this rank's connections of this group, from any thread, without the other ranks' help.

        Operations under way here raise at once and the other ranks see a closed connection; the group is unusable
        afterwards. Other groups are untouched.
        """
        if self.group is None:
            return
        if self.device.type != "cpu":
            self.group.abort()
            return
        if self.links is not None:
            self.links.abort()
        # Gloo has no abort, but a receive that times out closes every connection of its group.
        for peer in range(self.world_size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    self.group.recv([torch.empty(1)], peer, ABORT_TAG).wait(timedelta(milliseconds=1))

    # -- what the operations ask ----------------------------------------------------------------------------------
    def peer_group(self, peer: int) -> dist.ProcessGroup:
        """The process group, for a message to or from ``peer``, another rank of it."""
        if self.group is None or not is_whole(peer) or peer == self.rank or not 0 <= peer < self.world_size:
            raise CommunicationError(
                f"rank {self.rank} of group {self.label!r} has no peer {peer!r}: the other ranks are those from 0 to "
                f"{self.world_size - 1}, without itself."
            )
        return self.group

    def require_rank(self, rank: int) -> None:
        """Raise where ``rank`` is no rank of the group."""
        if not is_whole(rank) or not 0 <= rank < self.world_size:
            raise CommunicationError(
                f"group {self.label!r} has no rank {rank!r}: its ranks are 0 to {self.world_size - 1}."
            )

    def agree(self, operation: str, value: Any, **facts: Any) -> None:
        """Exchange what each rank is about to do, and raise on every rank where that differs."""
        collectives.agree(self, operation, value, facts)

    def _tag(self, tag: int) -> int:
        if not is_whole(tag) or not 0 <= tag < FIRST_OWN_TAG:
            raise CommunicationError(f"tag {tag!r} on rank {self.rank} is out of range: use 0 to {FIRST_OWN_TAG - 1}.")
        return tag
