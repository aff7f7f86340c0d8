"""Reductions over ranks, with one rule for every dtype.

======================  ==============================================================================================
floats, complex         reduced in their own dtype. An average is the sum divided by the number of ranks; float16 is
                        divided first, so that the sum cannot leave its range.
integers, sum           summed where no sum can overflow: 8 and 16 bits in int32, int32 in int64, int64 in two halves.
                        A sum that fits the caller's dtype lands there; one that does not comes back as a new int64
                        tensor, with a warning, on every rank alike. Beyond int64 is an error on every rank.
integers, product       multiplied exactly by every rank from all contributions; the same rule for the result.
integers, average       refused: it is not exact.
min, max                of the own dtype. NaN where any rank has NaN, and -0.0 is less than 0.0.
bool                    min and product are "all", max is "any"; a sum counts, and is always a new int64 tensor.
======================  ==============================================================================================
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from drivetrain.comm import schedules
from drivetrain.comm.arguments import is_whole_list, require_op
from drivetrain.comm.buffers import Flat, cut, joined, require_place, require_share, same_kind, tensor_of
from drivetrain.comm.choice import choose
from drivetrain.comm.failures import CommunicationError
from drivetrain.comm.point_to_point import exchange
from drivetrain.comm.schedule import Schedule
from drivetrain.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from drivetrain.comm.communicator import Communicator

ReduceOp = Literal["sum", "average", "min", "max", "product"]
NATIVE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_FLOATING = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16}) | _COMPLEX
_KNOWN = _FLOATING | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}

Run = Callable[[torch.Tensor, str], None]  # reduces a flat tensor in place, in its own dtype
Rows = Callable[[torch.Tensor], torch.Tensor | None]  # all ranks' flat int64 tensors as rows, where they are needed


# -- the operations -------------------------------------------------------------------------------------------------
def all_reduce(comm: Communicator, value: Any, op: str, algorithm: str | Schedule) -> Any:
    """See :meth:`drivetrain.comm.Communicator.all_reduce`."""
    require_algorithm(comm, algorithm)
    values = value if isinstance(value, list | tuple) else [value]
    for each in values:
        require(op, tensor_of(each).dtype, "all_reduce")
        require_place(each)
    if comm.check:
        comm.agree("all_reduce", value, op=op, algorithm=algorithm if isinstance(algorithm, str) else algorithm.name)

    def run(flat: torch.Tensor, how: str) -> None:
        all_reduce_flat(comm, flat, how, algorithm)

    def rows(flat: torch.Tensor) -> torch.Tensor:
        gathered = [torch.empty_like(flat) for _ in range(comm.world_size)]
        started = comm.statistics.start(flat)
        dist.all_gather(gathered, flat, group=comm.group)
        others = comm.world_size - 1
        comm.statistics.finish("all_reduce", started, flat.nbytes * others, others, flat.nbytes)
        return torch.stack(gathered)

    def operate(flat: torch.Tensor) -> torch.Tensor:
        return reduced(comm, flat, op, run, rows)

    if isinstance(value, list | tuple):
        return joined(comm, value, operate)
    flat = Flat(comm, value)
    result = operate(flat.tensor)
    return flat.put(result) if result.dtype == flat.tensor.dtype else flat.like(result)


def reduce(comm: Communicator, value: Any, destination: int, op: str) -> Any:
    """See :meth:`drivetrain.comm.Communicator.reduce`."""
    values = value if isinstance(value, list | tuple) else [value]
    comm.require_rank(destination)
    for each in values:
        require(op, tensor_of(each).dtype, "reduce")
        require_place(each)
    if comm.check:
        comm.agree("reduce", value, op=op, destination=destination)
    here = comm.rank == destination

    def run(flat: torch.Tensor, how: str) -> None:
        if comm.group is None or not flat.numel():
            return
        started = comm.statistics.start(flat)
        dist.reduce(flat, group=comm.group, group_dst=destination, op=NATIVE_OPS[how])
        comm.statistics.finish("reduce", started, 0 if here else flat.nbytes, 0 if here else 1, flat.nbytes)

    def rows(flat: torch.Tensor) -> torch.Tensor | None:
        started = comm.statistics.start(flat)
        gathered = [flat if rank == comm.rank else torch.empty_like(flat) for rank in range(comm.world_size)]
        others = [(rank, gathered[rank]) for rank in range(comm.world_size) if rank != comm.rank]
        exchange(comm, [] if here else [(destination, flat)], others if here else [])
        comm.statistics.finish("reduce", started, 0 if here else flat.nbytes, 0 if here else 1, flat.nbytes)
        return torch.stack(gathered) if here else None

    def operate(flat: torch.Tensor) -> torch.Tensor:
        # Transports leave partial sums where the result is not wanted: only a copy may hold them.
        return reduced(comm, flat if here else flat.clone(), op, run, rows, judge=here)

    if isinstance(value, list | tuple):
        if not here:
            for joint in _by_dtype(comm, value):
                operate(joint)
            return None
        return joined(comm, value, operate)
    flat = Flat(comm, value)
    result = operate(flat.tensor)
    if not here:
        return None
    return flat.put(result) if result.dtype == flat.tensor.dtype else flat.like(result)


def reduce_scatter(comm: Communicator, value: Any, op: str, sizes: Sequence[int] | None) -> Any:
    """See :meth:`drivetrain.comm.Communicator.reduce_scatter`."""
    n = comm.world_size
    if sizes is not None and not is_whole_list(sizes):
        raise CommunicationError(f"reduce_scatter got sizes={sizes!r}: give the number of rows of each of {n} ranks.")
    listed = isinstance(value, list | tuple)
    if listed:
        if len(value) != n:
            raise CommunicationError(f"reduce_scatter got {len(value)} parts for {n} ranks: give one for each rank.")
        shapes = [tuple(tensor_of(part).shape) for part in value]
        kinds = {tensor_of(part).dtype for part in value}
        if len(kinds) > 1:
            raise CommunicationError(f"reduce_scatter got parts of {', '.join(map(str, kinds))}: give one dtype.")
        whole = torch.cat([Flat(comm, part).tensor for part in value])
        like = value[comm.rank]
    else:
        shape = tensor_of(value).shape
        if not shape:
            raise CommunicationError("reduce_scatter cannot cut a tensor without dimensions: give one number a rank.")
        lengths = cut(shape[0], n) if sizes is None else list(sizes)
        if len(lengths) != n or sum(lengths) != shape[0] or min(lengths) < 0:
            raise CommunicationError(f"sizes {lengths} do not cut {shape[0]} rows into {n} parts.")
        shapes = [(length, *shape[1:]) for length in lengths]
        whole, like = Flat(comm, value).tensor, value
    require(op, whole.dtype, "reduce_scatter")
    if comm.check:
        comm.agree("reduce_scatter", value, op=op, shapes=[list(shape) for shape in shapes])
    counts = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
    starts = np.cumsum([0, *counts]).tolist()
    mine = slice(starts[comm.rank], starts[comm.rank + 1])

    def run(flat: torch.Tensor, how: str) -> None:
        longest = max(counts)
        stride = flat.numel() // max(1, starts[-1])  # 2 where numbers travel as two halves
        if comm.group is None or not longest:
            return
        started = comm.statistics.start(flat)
        if stride == 1 and min(counts) == longest:
            padded = flat
        else:
            padded = flat.new_zeros(n, stride, longest)
            for rank, part in enumerate(flat.view(stride, -1).split(counts, dim=1)):
                padded[rank, :, : counts[rank]] = part
        out = flat.new_empty(stride * longest)
        native("reduce_scatter_single", "reduce_scatter_tensor")(
            out, padded.view(-1), op=NATIVE_OPS[how], group=comm.group
        )
        flat.view(stride, -1)[:, mine] = out.view(stride, longest)[:, : counts[comm.rank]]
        sent = (flat.nbytes // max(1, starts[-1])) * (starts[-1] - counts[comm.rank])
        comm.statistics.finish("reduce_scatter", started, sent, n - 1, flat.nbytes)

    def rows(flat: torch.Tensor) -> torch.Tensor:
        started = comm.statistics.start(flat)
        parts = flat.split(counts)
        arrived = [parts[comm.rank] if rank == comm.rank else torch.empty_like(parts[comm.rank]) for rank in range(n)]
        others = [rank for rank in range(n) if rank != comm.rank]
        exchange(comm, [(r, parts[r]) for r in others], [(r, arrived[r]) for r in others])
        sent = flat.nbytes - parts[comm.rank].nbytes
        comm.statistics.finish("reduce_scatter", started, sent, n - 1, flat.nbytes)
        return torch.stack(arrived)

    kept = whole.clone()
    result = reduced(comm, kept, op, run, rows, part=mine)
    return same_kind(like, result.view(shapes[comm.rank]))


def reduce_scatter_flat(comm: Communicator, output: torch.Tensor, tensor: torch.Tensor, op: str) -> torch.Tensor:
    """See :meth:`drivetrain.comm.Communicator.reduce_scatter_flat`."""
    require_op("reduce_scatter_flat", op, CommunicationError)
    if op == "average":
        raise CommunicationError("reduce_scatter_flat has no average: take op='sum' and divide, or reduce_scatter.")
    require_share(comm, "reduce_scatter_flat", output, tensor)
    if comm.group is None:
        return output.copy_(tensor)
    started = comm.statistics.start(tensor)
    native("reduce_scatter_single", "reduce_scatter_tensor")(output, tensor, op=NATIVE_OPS[op], group=comm.group)
    others = comm.world_size - 1
    comm.statistics.finish("reduce_scatter", started, output.nbytes * others, others, tensor.nbytes)
    return output


def _by_dtype(comm: Communicator, values: Any) -> list[torch.Tensor]:
    flats = [Flat(comm, value).tensor for value in values]
    return [torch.cat([f for f in flats if f.dtype == kind]) for kind in dict.fromkeys(f.dtype for f in flats)]


# -- the rule -------------------------------------------------------------------------------------------------------
def require(op: str, dtype: torch.dtype, operation: str) -> None:
    """Raise where ``op`` of ``dtype`` is not defined; before anything is sent, so on every rank alike."""
    require_op(operation, op, CommunicationError)
    if dtype not in _KNOWN:
        raise CommunicationError(f"{operation} cannot reduce {dtype}: convert it to a float or integer of torch's.")
    if op == "average" and dtype not in _FLOATING:
        raise CommunicationError(f"the average of {dtype} is not exact: use op='sum', or a float tensor.")
    if dtype in _COMPLEX and op not in ("sum", "average"):
        raise CommunicationError(f"the {op} of {dtype} is not defined over ranks: reduce real and imaginary parts.")


def require_algorithm(comm: Communicator, algorithm: object) -> None:
    """Raise where ``algorithm`` is neither a name for an all-reduce nor a schedule of one.

    Raises:
        ConfigurationError: with the nearest name.
    """
    if isinstance(algorithm, str):
        if algorithm in ("auto", "native") or comm.knows(algorithm):
            return
        known = ["auto", "native", *schedules.names()]
        if algorithm not in known:
            raise ConfigurationError(f"all_reduce knows no algorithm {algorithm!r}: {nearest(algorithm, known)}")
    elif not isinstance(algorithm, Schedule):
        raise ConfigurationError(
            f"algorithm={algorithm!r} of all_reduce is of type {type(algorithm).__name__}: pass a name, such as "
            "'ring', or a Schedule."
        )
    elif algorithm.kind != "all_reduce":
        raise ConfigurationError(
            f"schedule {algorithm.name!r} is a {algorithm.kind}, not an all_reduce: make it of that kind, or run it "
            "with drivetrain.comm.execute.run."
        )


def reduced(
    comm: Communicator,
    flat: torch.Tensor,
    op: str,
    run: Run,
    rows: Rows,
    *,
    judge: bool = True,
    part: slice | None = None,
) -> torch.Tensor:
    """``flat`` reduced by ``run`` as the module's rule says: itself, overwritten, or a new tensor of int64.

    Args:
        comm: the ranks.
        flat: this rank's contribution.
        op: what to do.
        run: the reduction in place, for what needs no care.
        rows: every rank's contribution, for exact products.
        judge: whether the result is here, and must be looked at.
        part: the elements that this rank keeps; the result has only these. Integers then always become int64, since
            what fits on one rank may not fit on another.
    """
    dtype = flat.dtype
    if dtype in _FLOATING and op in ("min", "max"):
        ordered = _ordered(flat, op)
        run(ordered, op)
        flat.copy_(_floats(ordered))
        return flat if part is None else flat[part]
    if dtype in _FLOATING:
        early = op == "average" and dtype == torch.float16
        if early:
            flat.div_(comm.world_size)
        run(flat, "sum" if op == "average" else op)
        if op == "average" and not early:
            flat.div_(comm.world_size)
        return flat if part is None else flat[part]
    if dtype == torch.bool and op != "sum":
        run(flat.view(torch.uint8), "max" if op == "max" else "min")
        return flat if part is None else flat[part]
    if op in ("min", "max"):
        # No transport knows 16 bits.
        wide = flat.to(torch.int32) if dtype == torch.int16 else flat
        run(wide, op)
        flat = flat if wide is flat else flat.copy_(wide)
        return flat if part is None else flat[part]
    result = _exact(comm, flat, op, run, rows, judge, part)
    if not judge or part is not None or dtype == torch.bool:
        return result
    return _fitted(flat, result, op)


def _ordered(flat: torch.Tensor, op: str) -> torch.Tensor:
    """Whole numbers in the order of the floats of ``flat``, NaN at the end that ``op`` looks for. Transports compare
    floats, and NaN is neither less nor greater: whether it or a number came out hung on which rank had it."""
    wide = flat if flat.dtype == torch.float64 else flat.float()
    bits = wide.view(torch.int64 if wide.dtype == torch.float64 else torch.int32)
    limits = torch.iinfo(bits.dtype)
    return _turned(bits).masked_fill_(wide.isnan(), limits.min if op == "min" else limits.max)


def _floats(ordered: torch.Tensor) -> torch.Tensor:
    """The floats that :func:`_ordered` was given; NaN for either end."""
    return _turned(ordered).view(torch.float64 if ordered.dtype == torch.int64 else torch.float32)


def _turned(bits: torch.Tensor) -> torch.Tensor:
    # The bits of a float are ordered as its size: those of negative ones are turned round, but for their sign.
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def _exact(
    comm: Communicator, flat: torch.Tensor, op: str, run: Run, rows: Rows, judge: bool, part: slice | None
) -> torch.Tensor:
    """The sum or product of integers in int64."""
    if op == "product":
        if comm.group is None:
            return flat.to(torch.int64)
        found = rows(flat.to(torch.int64))
        return flat if found is None else _product(found, comm)
    if flat.dtype == torch.int64:
        # Each half has 32 bits to spare for carries.
        halves = torch.cat([flat >> 32, flat & 0xFFFFFFFF])
        run(halves, "sum")
        high, low = halves.view(2, -1)
        if part is not None:
            high, low = high[part], low[part]
        high = high + (low >> 32)
        if judge and high.numel() and (int(high.min()) < -(2**31) or int(high.max()) >= 2**31):
            raise _overflow("sum", comm)
        return (high << 32) | (low & 0xFFFFFFFF)
    narrow = flat.dtype != torch.int32 and comm.world_size < 2**15
    wide = flat.to(torch.int32 if narrow else torch.int64)
    run(wide, "sum")
    return (wide if part is None else wide[part]).to(torch.int64)


def _fitted(flat: torch.Tensor, result: torch.Tensor, op: str) -> torch.Tensor:
    """``flat`` holding ``result`` if its dtype can, else ``result``."""
    limits = torch.iinfo(flat.dtype)
    if not result.numel() or (int(result.min()) >= limits.min and int(result.max()) <= limits.max):
        return flat.copy_(result)
    warnings.warn(
        f"a {op} of {flat.dtype} over the ranks does not fit: it is returned as a new int64 tensor, and the tensor "
        "given keeps what it had.",
        stacklevel=_outside(),
    )
    return result


def _outside() -> int:
    """How far up the stack whoever called a communicator is: a warning is shown once for each line, so it must be
    theirs."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("drivetrain.comm."):
        frame, level = frame.f_back, level + 1
    return level


def _product(rows: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """The exact product of int64 ``rows``, ``(ranks, numbers)``, over the ranks."""
    values = rows.cpu().numpy()
    negative = (values < 0).sum(0) % 2 == 1
    zero = (values == 0).any(0)
    bits = values.astype(np.uint64)
    sizes = np.where(values < 0, ~bits + np.uint64(1), bits)
    sizes[:, zero] = 1  # however large the others are
    total = np.ones(values.shape[1], np.uint64)
    over = np.zeros(values.shape[1], np.bool_)
    for factor in sizes:
        over |= total > np.uint64(2**64 - 1) // factor
        total = total * factor
    over |= total > np.where(negative, np.uint64(2**63), np.uint64(2**63 - 1))
    if over.any():
        raise _overflow("product", comm)
    signed = np.where(negative, ~total + np.uint64(1), total).view(np.int64)
    signed[zero] = 0
    return torch.from_numpy(signed).to(rows.device)


def _overflow(op: str, comm: Communicator) -> CommunicationError:
    return CommunicationError(
        f"the {op} of int64 over the {comm.world_size} ranks of group {comm.label!r} is beyond int64: use float64."
    )


# -- the transport --------------------------------------------------------------------------------------------------
def all_reduce_flat(comm: Communicator, flat: torch.Tensor, op: str, algorithm: str | Schedule) -> None:
    """Reduce the flat contiguous tensor in place, in its own dtype, by the algorithm named (``"native"``, ``"auto"`` or
    a topology) or by a schedule; ``op`` is sum, product, min or max."""
    if algorithm == "auto":
        algorithm = choose(comm, "all_reduce", flat.nbytes)
    if algorithm != "native":
        from drivetrain.comm import execute

        execute.run(comm.schedule(algorithm) if isinstance(algorithm, str) else algorithm, flat, comm, op)
        return
    if comm.group is None or not flat.numel():
        return
    started = comm.statistics.start(flat)
    dist.all_reduce(flat, op=NATIVE_OPS[op], group=comm.group)
    n = comm.world_size
    comm.statistics.finish("all_reduce", started, 2 * flat.nbytes * (n - 1) // n, 2 * (n - 1), flat.nbytes)


def native(new: str, old: str) -> Any:
    """torch 2.13 renamed these collectives and warns at the old names; torch 2.11 knows only the old ones."""
    return getattr(dist, new, None) or getattr(dist, old)
