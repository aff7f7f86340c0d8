"""Collectives that move data and compute nothing. Those whose parts differ in size are rounds of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from drivetrain.comm.arguments import is_whole_list
from drivetrain.comm.buffers import Flat, as_bytes, cut, joined, require_place, require_share, same_kind, tensor_of
from drivetrain.comm.failures import CommunicationError
from drivetrain.comm.point_to_point import (
    HEADER_TAG,
    announced,
    empty_header,
    exchange,
    exchange_announced,
    header,
    on_device,
)
from drivetrain.comm.reduction import native

if TYPE_CHECKING:
    from drivetrain.comm.communicator import Communicator


def broadcast(comm: Communicator, value: Any, source: int) -> Any:
    """See :meth:`drivetrain.comm.Communicator.broadcast`."""
    comm.require_rank(source)
    for each in value if isinstance(value, list | tuple) else [value]:
        require_place(each)
    if comm.check:
        comm.agree("broadcast", value, source=source)

    def operate(flat: torch.Tensor) -> torch.Tensor:
        if comm.group is not None and flat.numel():
            started = comm.statistics.start(flat)
            dist.broadcast(as_bytes(flat), group=comm.group, group_src=source)
            root = comm.rank == source
            comm.statistics.finish("broadcast", started, flat.nbytes if root else 0, 1 if root else 0, flat.nbytes)
        return flat

    if isinstance(value, list | tuple):
        return joined(comm, value, operate)
    flat = Flat(comm, value)
    operate(flat.tensor)
    return value if comm.rank == source else flat.land()


def all_gather(comm: Communicator, value: Any, uneven: bool, sizes: Sequence[int] | None) -> list[Any]:
    """See :meth:`drivetrain.comm.Communicator.all_gather`."""
    if isinstance(value, list | tuple):
        columns = [all_gather(comm, each, uneven, sizes) for each in value]
        return [[column[rank] for column in columns] for rank in range(comm.world_size)]
    if comm.check:
        comm.agree("all_gather", None if uneven or sizes is not None else value, uneven=uneven)
    flat = Flat(comm, value)
    if comm.group is None:
        return [same_kind(value, flat.tensor.clone().view(flat.shape))]
    shapes = _shapes(comm, flat, uneven, sizes)
    counts = [shape.numel() for shape in shapes]
    longest = max(counts)
    parts = [flat.tensor.new_empty(longest) for _ in shapes]
    if longest:
        mine = flat.tensor
        if mine.numel() < longest:
            mine = torch.cat([mine, mine.new_zeros(longest - mine.numel())])
        started = comm.statistics.start(mine)
        dist.all_gather([as_bytes(part) for part in parts], as_bytes(mine), group=comm.group)
        others = comm.world_size - 1
        comm.statistics.finish("all_gather", started, mine.nbytes * others, others, mine.nbytes * comm.world_size)
    return [same_kind(value, p[:n].view(s)) for p, n, s in zip(parts, counts, shapes, strict=True)]


def all_gather_flat(comm: Communicator, output: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """See :meth:`drivetrain.comm.Communicator.all_gather_flat`."""
    require_share(comm, "all_gather_flat", tensor, output)
    if comm.group is None:
        return output.copy_(tensor)
    started = comm.statistics.start(tensor)
    native("all_gather_single", "all_gather_into_tensor")(output, tensor, group=comm.group)
    others = comm.world_size - 1
    comm.statistics.finish("all_gather", started, tensor.nbytes * others, others, output.nbytes)
    return output


def _shapes(comm: Communicator, flat: Flat, uneven: bool, sizes: Sequence[int] | None) -> list[torch.Size]:
    """The shapes of all ranks' tensors: asked for, told, or all like this one."""
    shape = flat.shape
    if sizes is not None:
        if not is_whole_list(sizes) or not shape or len(sizes) != comm.world_size or sizes[comm.rank] != shape[0]:
            raise CommunicationError(
                f"sizes {sizes!r} do not fit rank {comm.rank} of {comm.world_size} with shape {tuple(shape)}: "
                "give the first dimension of every rank's tensor."
            )
        return [torch.Size([size, *shape[1:]]) for size in sizes]
    if not uneven:
        return [shape] * comm.world_size
    said = comm.all_gather_plain([list(shape), str(flat.tensor.dtype)])
    if len({dtype for _, dtype in said}) > 1:
        raise CommunicationError(
            f"the ranks of group {comm.label!r} bring {', '.join(dtype for _, dtype in said)} to all_gather: convert "
            "them to one dtype."
        )
    return [torch.Size(each) for each, _ in said]


def gather(comm: Communicator, value: Any, destination: int, uneven: bool) -> list[Any] | None:
    """See :meth:`drivetrain.comm.Communicator.gather`."""
    comm.require_rank(destination)
    here = comm.rank == destination
    if isinstance(value, list | tuple):
        columns = [gather(comm, each, destination, uneven) for each in value]
        return [[c[rank] for c in columns if c is not None] for rank in range(comm.world_size)] if here else None
    if comm.check:
        comm.agree("gather", None if uneven else value, destination=destination, uneven=uneven)
    mine = on_device(comm, value)
    others = [rank for rank in range(comm.world_size) if rank != destination]
    started = comm.statistics.start(mine)
    sends = [] if here else [(destination, mine)]
    if uneven:
        arrived = exchange_announced(comm, sends, others if here else [])
    else:
        arrived = [torch.empty_like(mine) for _ in others] if here else []
        receives = [(rank, part.view(-1)) for rank, part in zip(others, arrived, strict=False)]
        exchange(comm, [(peer, tensor.view(-1)) for peer, tensor in sends], receives)
    size = mine.nbytes + sum(part.nbytes for part in arrived) if here else mine.nbytes * comm.world_size
    comm.statistics.finish("gather", started, 0 if here else mine.nbytes, 0 if here else 1, size)
    if not here:
        return None
    arrived.insert(destination, mine.clone())
    return [same_kind(value, part) for part in arrived]


def scatter(comm: Communicator, value: Any, source: int, output: Any) -> Any:
    """See :meth:`drivetrain.comm.Communicator.scatter`."""
    comm.require_rank(source)
    if output is not None:
        require_place(output)
    if comm.check:
        comm.agree("scatter", None, source=source)
    started = comm.statistics.start()
    like: Any
    if comm.rank == source:
        peers = [rank for rank in range(comm.world_size) if rank != source]
        parts = _parts(comm, value, "scatter")
        given = value if isinstance(value, list | tuple) else [value] * comm.world_size
        heads = [
            header(comm, part, array=isinstance(each, np.ndarray)) for part, each in zip(parts, given, strict=True)
        ]
        exchange(comm, [(rank, heads[rank]) for rank in peers], [], HEADER_TAG)
        exchange(comm, [(rank, parts[rank].view(-1)) for rank in peers], [])
        mine, like = parts[source].clone(), given[source]
        sent = sum(parts[rank].nbytes for rank in peers)
        comm.statistics.finish("scatter", started, sent, len(peers), sent + mine.nbytes)
    else:
        head = empty_header(comm)
        exchange(comm, [], [(source, head)], HEADER_TAG)
        mine, array = announced(comm, head)
        exchange(comm, [], [(source, mine.view(-1))])
        like = np.empty(0) if array else mine
        comm.statistics.finish("scatter", started, 0, 0, mine.nbytes * comm.world_size)
    if output is None:
        return same_kind(like, mine)
    flat = Flat(comm, output)
    if flat.shape != mine.shape or flat.tensor.dtype != mine.dtype:
        raise CommunicationError(
            f"rank {comm.rank} got {tuple(mine.shape)} of {mine.dtype} from rank {source} but its output is "
            f"{tuple(flat.shape)} of {flat.tensor.dtype}: make it like the part, or leave it out."
        )
    return flat.put(mine.view(-1))


def all_to_all(comm: Communicator, value: Any, uneven: bool) -> Any:
    """See :meth:`drivetrain.comm.Communicator.all_to_all`."""
    whole = not isinstance(value, list | tuple)
    if comm.check:
        comm.agree("all_to_all", None if uneven else value, uneven=uneven)
    parts = _parts(comm, value, "all_to_all")
    if not uneven and len({(part.shape, part.dtype) for part in parts}) > 1:
        raise CommunicationError(
            f"all_to_all on rank {comm.rank} got parts of shapes {', '.join(str(tuple(p.shape)) for p in parts)}: "
            "give equal parts, or uneven=True on every rank."
        )
    peers = [rank for rank in range(comm.world_size) if rank != comm.rank]
    started = comm.statistics.start(parts[0])
    if uneven:
        arrived = exchange_announced(comm, [(rank, parts[rank]) for rank in peers], peers)
    else:
        arrived = [torch.empty_like(parts[rank]) for rank in peers]
        exchange(
            comm,
            [(rank, parts[rank].view(-1)) for rank in peers],
            [(rank, part.view(-1)) for rank, part in zip(peers, arrived, strict=True)],
        )
    sent = sum(parts[rank].nbytes for rank in peers)
    comm.statistics.finish("all_to_all", started, sent, len(peers), sent + parts[comm.rank].nbytes)
    arrived.insert(comm.rank, parts[comm.rank].clone())
    if whole:
        return same_kind(value, torch.cat(arrived))
    return [same_kind(value[0], part) for part in arrived]


def _parts(comm: Communicator, value: Any, operation: str) -> list[torch.Tensor]:
    """What goes to each rank: a list's elements, or a tensor's rows cut as evenly as can be."""
    n = comm.world_size
    if isinstance(value, list | tuple):
        if len(value) != n:
            raise CommunicationError(
                f"{operation} on rank {comm.rank} got {len(value)} parts for {n} ranks: give one for each rank."
            )
        return [on_device(comm, part) for part in value]
    if value is None:
        raise CommunicationError(f"{operation} on rank {comm.rank} got nothing to send: give a tensor or {n} parts.")
    whole = on_device(comm, value)
    if not whole.dim():
        raise CommunicationError(f"{operation} cannot cut a tensor without dimensions: give one part for each rank.")
    return [part.contiguous() for part in whole.split(cut(whole.shape[0], n))]


def agree(comm: Communicator, operation: str, value: Any, facts: dict[str, Any]) -> None:
    """Exchange what each rank is about to do, and raise on every rank where that differs.

    Raises:
        CommunicationError: names the ranks and what they are about to do.
    """
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    tensors = [tensor_of(each) for each in values]
    what = " ".join(
        [
            operation,
            *(f"{name}={fact}" for name, fact in facts.items()),
            *(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors),
        ]
    )
    said: dict[str, list[int]] = {}
    for rank, other in enumerate(comm.all_gather_plain(what)):
        said.setdefault(str(other), []).append(rank)  # who is elsewhere may say anything
    if len(said) > 1:
        differ = "; ".join(f"rank {', '.join(map(str, ranks))}: {other}" for other, ranks in said.items())
        raise CommunicationError(
            f"the ranks of group {comm.label!r} do not do the same ({differ}): call the same operation with the same "
            "shape, dtype and arguments on all of them."
        )
