"""A group of ranks that can talk to each other: torch process groups with plain-data exchange and traffic counts."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from drivetrain.comm.statistics import Statistics
from drivetrain.errors import DrivetrainError

ReduceOp = Literal["sum", "average", "min", "max", "product"]
_NATIVE = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_ABORT_TAG = 2**30


class CommunicationError(DrivetrainError):
    """Ranks could not exchange what they were asked to; says which rank and what to do."""


class Handle(Protocol):
    """An operation under way."""

    def wait(self) -> Any:
        """Return when the operation is complete; raises what the transport raised."""


class Communicator:
    """The ranks of one torch process group; with one rank it needs no process group and every collective is identity.

    Peers are ranks of this group, never of the job. One communicator belongs to one thread: concurrent work takes
    communicators of its own, made with :meth:`sub`.

    Args:
        group: The process group, or None for a world of one rank.
        device: Where plain data is put to be sent: ``cpu`` for Gloo, this rank's GPU for NCCL.
        label: Name of the group in error messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        label: str = "world",
    ) -> None:
        self.group = group
        self.device = torch.device(device)
        self.label = label
        self.rank: int = 0 if group is None else group.rank()
        self.world_size: int = 1 if group is None else group.size()
        self.statistics = Statistics()

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0 of the group."""
        return self.rank == 0

    # Point to point

    def isend(self, tensor: torch.Tensor, destination: int, tag: int = 0) -> Handle:
        """Start sending a contiguous ``tensor``; it must not change before ``wait`` returns.

        Raises:
            CommunicationError: ``destination`` is this rank or no rank of the group.
        """
        handle = self._peer_group(destination).send([tensor], destination, tag)
        self.statistics.record("send", bytes_sent=tensor.nbytes, messages=1)
        return handle

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Handle:
        """Start receiving into a contiguous ``tensor``, in place.

        Raises:
            CommunicationError: ``source`` is this rank or no rank of the group.
        """
        return self._peer_group(source).recv([tensor], source, tag)

    def send(self, tensor: torch.Tensor, destination: int, tag: int = 0) -> None:
        """Send a contiguous ``tensor`` and wait until it may change again. Raises as :meth:`isend`."""
        started = time.perf_counter()
        self._peer_group(destination).send([tensor], destination, tag).wait()
        self._record("send", started, tensor.nbytes, 1)

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> torch.Tensor:
        """Receive into a contiguous ``tensor`` and return it. Raises as :meth:`irecv`."""
        started = time.perf_counter()
        self.irecv(tensor, source, tag).wait()
        self._record("recv", started, 0, 0)
        return tensor

    # Collectives

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrite ``tensor`` on every rank with that of ``source``, in place; returns it."""
        if self.group is None:
            return tensor
        started = time.perf_counter()
        dist.broadcast(tensor, group=self.group, group_src=source)
        root = self.rank == source
        self._record("broadcast", started, tensor.nbytes if root else 0, 1 if root else 0)
        return tensor

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Combine ``tensor`` over all ranks, in place on every rank; returns it.

        Raises:
            CommunicationError: ``op`` is unknown, or "average" is asked of an integer tensor.
        """
        if op not in _NATIVE:
            raise CommunicationError(f"all_reduce knows no op {op!r}: use one of {', '.join(_NATIVE)}.")
        if op == "average" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise CommunicationError(f"the average of {tensor.dtype} is not exact: use op='sum', or a float tensor.")
        if self.group is None:
            return tensor
        started = time.perf_counter()
        dist.all_reduce(tensor, op=_NATIVE[op], group=self.group)
        if op == "average":
            tensor.div_(self.world_size)
        share = 2 * tensor.nbytes * (self.world_size - 1) // self.world_size
        self._record("all_reduce", started, share, 2 * (self.world_size - 1))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks in rank order; shape and dtype must be equal on all of them."""
        if self.group is None:
            return [tensor.clone()]
        started = time.perf_counter()
        tensor = tensor.contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor, group=self.group)
        self._record("all_gather", started, tensor.nbytes * (self.world_size - 1), self.world_size - 1)
        return gathered

    def all_gather_flat(self, output: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Fill ``output``, of ``world_size * tensor.numel()`` elements, with the tensors of all ranks; returns it."""
        if self.group is None:
            return output.copy_(tensor)
        started = time.perf_counter()
        _native("all_gather_single", "all_gather_into_tensor")(output, tensor, group=self.group)
        self._record("all_gather", started, tensor.nbytes * (self.world_size - 1), self.world_size - 1)
        return output

    def reduce_scatter_flat(self, output: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor``, of ``world_size * output.numel()`` elements; rank r keeps the r-th part in ``output``."""
        if self.group is None:
            return output.copy_(tensor)
        started = time.perf_counter()
        _native("reduce_scatter_single", "reduce_scatter_tensor")(output, tensor, group=self.group)
        self._record("reduce_scatter", started, output.nbytes * (self.world_size - 1), self.world_size - 1)
        return output

    def gather_plain(self, data: Any, destination: int = 0) -> list[Any] | None:
        """The plain ``data`` of all ranks in rank order on ``destination``; None on the others.

        Plain is what JSON can hold; it travels as JSON, never as a pickle, so tuples come back as lists and keys as
        strings.

        Raises:
            CommunicationError: the data of some rank is not plain; raised on every rank, naming those.
        """
        gathered = self._exchange_plain(data, destination)
        return gathered if self.rank == destination else None

    def all_gather_plain(self, data: Any) -> list[Any]:
        """The plain ``data`` of all ranks in rank order, on every rank. Plain and errors as in :meth:`gather_plain`."""
        return self._exchange_plain(data, None)

    def _exchange_plain(self, data: Any, destination: int | None) -> list[Any]:
        started = time.perf_counter()
        try:
            encoded, problem = json.dumps(data).encode(), None
        except (TypeError, ValueError) as error:
            encoded, problem = b"", error
        # A rank that cannot encode tells the others, which would wait for it otherwise.
        sizes = self._sizes(-1 if problem else len(encoded))
        refused = [rank for rank, size in enumerate(sizes) if size < 0]
        if refused:
            raise CommunicationError(
                f"the data of rank {', '.join(map(str, refused))} in group {self.label!r} is not plain"
                f"{f' ({problem})' if problem else ''}: send only what JSON can hold."
            ) from problem
        if self.group is None:
            return [json.loads(encoded)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        padded = padded.to(self.device)
        receives = destination is None or self.rank == destination
        parts = [torch.empty_like(padded) for _ in sizes] if receives else None
        if destination is None:
            dist.all_gather(parts, padded, group=self.group)
            copies = self.world_size - 1
        else:
            dist.gather(padded, parts, group=self.group, group_dst=destination)
            copies = 0 if receives else 1
        self._record("plain", started, copies * padded.nbytes, copies)
        rows = zip(parts or (), sizes, strict=False)
        return [json.loads(part[:size].cpu().numpy().tobytes()) for part, size in rows]

    def _sizes(self, size: int) -> list[int]:
        mine = torch.tensor([size], dtype=torch.int64, device=self.device)
        return [int(other) for other in torch.cat(self.all_gather(mine)).tolist()]

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every rank is here.

        Args:
            timeout: Seconds to wait; None is the timeout of the process group. After a timeout the group is unusable.

        Raises:
            CommunicationError: ranks did not arrive in time, or died.
        """
        if self.group is None:
            return
        started = time.perf_counter()
        limit = None if timeout is None else timedelta(seconds=timeout)
        try:
            if self.device.type == "cpu":
                dist.monitored_barrier(self.group, timeout=limit, wait_all_ranks=True)
            else:
                self._device_barrier(timeout)
        except RuntimeError as error:
            waited = time.perf_counter() - started
            raise CommunicationError(
                f"rank {self.rank} waited {waited:.1f} s at the barrier of group {self.label!r} and not every rank came"
                f" ({str(error).splitlines()[0]}): see the logs of the ranks named, or allow a longer timeout."
            ) from error
        self._record("barrier", started, 0, 1)

    def _device_barrier(self, timeout: float | None) -> None:
        work = dist.barrier(group=self.group, async_op=True, device_ids=[self.device.index or 0])
        # Waiting for NCCL takes no timeout of its own, so it is asked until the time is up.
        deadline = None if timeout is None else time.monotonic() + timeout
        while deadline is not None and not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out after {timeout} s")
            time.sleep(0.0005)
        work.wait()

    # Groups

    def sub(self, ranks: Sequence[int], label: str) -> Communicator | None:
        """A communicator of its own for ``ranks``, rising ranks of this group, renumbered from 0.

        Every rank of the *job* must make the same call in the same order, as torch requires of new groups. Returns
        None on ranks that are not in ``ranks``. Statistics start at zero.

        Raises:
            CommunicationError: ``ranks`` is empty, not rising, or names a rank that is not in this group.
        """
        if not ranks or list(ranks) != sorted(set(ranks)) or not 0 <= ranks[0] <= ranks[-1] < self.world_size:
            raise CommunicationError(
                f"cannot form group {label!r} of ranks {list(ranks)}: use rising ranks below {self.world_size}."
            )
        if self.group is None:
            return Communicator(None, self.device, label)
        members = [dist.get_global_rank(self.group, rank) for rank in ranks]
        group = dist.new_group(members, group_desc=label)
        return Communicator(group, self.device, label) if self.rank in ranks else None

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
        # Gloo has no abort, but a receive that times out closes every connection of its group.
        for peer in range(self.world_size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    self.group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def _peer_group(self, peer: int) -> dist.ProcessGroup:
        if self.group is None or peer == self.rank or not 0 <= peer < self.world_size:
            raise CommunicationError(
                f"rank {self.rank} of group {self.label!r} has no peer {peer}: the other ranks are those from 0 to "
                f"{self.world_size - 1}, without itself."
            )
        return self.group

    def _record(self, operation: str, started: float, bytes_sent: int, messages: int) -> None:
        seconds = time.perf_counter() - started
        self.statistics.record(operation, bytes_sent=bytes_sent, messages=messages, seconds=seconds)


def _native(new: str, old: str) -> Any:
    """torch 2.13 renamed these collectives and warns at the old names; torch 2.11 knows only the old ones."""
    return getattr(dist, new, None) or getattr(dist, old)
