"""Time operations on real ranks: interleaved repeats, the slowest rank's time, medians.

Ranks are processes of this machine, started for it, or those of the job in which the command itself runs (torchrun,
srun, mpirun), which may span hosts. Tensors are zeros: sums of them never overflow, so nothing has to be refilled
between repeats, and a rank that has just filled one would be made to wait by the scheduler.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain.comm.units import shown_size
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.launch.temporary import temporary_folder

if TYPE_CHECKING:
    import torch

    from drivetrain.comm.communicator import Communicator

Operation = Callable[["torch.Tensor"], object]
Operations = Callable[["Communicator", Sequence[str]], dict[str, Operation]]

# Everything is timed so often; then only what may be the best, at least so many times more.
_FIRST, _FURTHER = 3, 4
# Processes that are started here at most, whatever the machine, and for each of its cores.
LEAST_RANKS, RANKS_PER_CORE = 64, 8
# Whose shortest time is so many times the best median cannot be the best: the time is for the others.
_HOPELESS = 1.6


class MeasurementError(DrivetrainError):
    """Operations could not be timed; says why and what to do."""


@dataclass(frozen=True)
class Request:
    """What is to be timed on one number of ranks.

    Args:
        operations: makes the operations named, on every rank; a function of a module, since other processes import it.
        names: which; those with the same word before a ``/`` are compared with each other, and those that end in
            ``native`` are what others are compared with.
        sizes: of the tensors in bytes, on every rank.
        repeats: timings of each at most; their median counts.
        seconds: how long one size may take: fewer repeats are made of what takes long, but three at least of each, and
            seven of what may be the fastest.
        device: ``"cpu"`` (Gloo) or ``"cuda"`` (NCCL, one GPU per rank).
    """

    operations: Operations
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    repeats: int = 11
    seconds: float = 2.0
    device: str = "cpu"


class Sample(NamedTuple):
    """Seconds that an operation took at one size: the median over the repeats of the slowest rank, and the least."""

    operation: str
    size_bytes: int
    seconds: float
    least: float
    repeats: int


class Measured(NamedTuple):
    """The samples of one number of ranks, and how many of these each host had."""

    hosts: tuple[int, ...]
    samples: list[Sample]


def measure(requests: Sequence[Request], world_size: int) -> list[Measured]:
    """Time ``requests``, all for one device, on ``world_size`` processes of this machine, started for it.

    Raises:
        MeasurementError: a rank failed; its own traceback is on standard error.
        ConfigurationError: there are fewer GPUs than ranks.
    """
    require_room(requests, world_size)
    found: list[list[Sample]] = run_ranks(_measure_rank, world_size, requests)
    return [Measured((world_size,), samples) for samples in found]


def require_room(requests: Sequence[Request], ranks: int) -> None:
    """Raise where this machine cannot hold so many ``ranks`` with tensors of these sizes; before any is started.

    Raises:
        ConfigurationError: says what it lacks.
    """
    largest = max(size for request in requests for size in request.sizes)
    if requests[0].device == "cuda":
        import torch

        if torch.cuda.device_count() < ranks:
            raise ConfigurationError(
                f"{ranks} ranks need as many GPUs, this machine has {torch.cuda.device_count()}: ask for fewer "
                "workers or take --device cpu."
            )
        memory, needed = torch.cuda.get_device_properties(0).total_memory, 2 * largest
    else:
        cores = os.cpu_count() or 1
        if ranks > (most := max(LEAST_RANKS, RANKS_PER_CORE * cores)):
            raise ConfigurationError(
                f"{ranks} ranks on {cores} cores would measure the scheduler: ask for {most} workers at most."
            )
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        needed = 2 * largest * ranks
    if needed > memory:
        raise ConfigurationError(
            f"tensors of {shown_size(largest)} on {ranks} ranks, with as much again for what arrives, do not fit into "
            f"{shown_size(memory)} of memory: ask for smaller sizes or fewer workers."
        )


def require_amount(repeats: int, seconds: float, prefix: str = "") -> None:
    """Raise where ``repeats`` or ``seconds`` of a :class:`Request` cannot be meant; ``prefix`` is what options have.

    Raises:
        ConfigurationError: says so.
    """
    if repeats < 1 or not 0 < seconds < math.inf:
        raise ConfigurationError(f"{prefix}repeats and {prefix}seconds must be above zero and finite.")


def measure_here(requests: Sequence[Request]) -> list[Measured]:
    """Time ``requests``, all for one device, on the ranks of the job that this process belongs to; the same on all.

    Raises:
        DrivetrainError: the job could not be joined.
    """
    import torch
    import torch.distributed as dist

    from drivetrain.comm.choice import ranks_per_host
    from drivetrain.comm.world import world_communicator
    from drivetrain.launch import current_job, destroy_process_group, init_process_group

    job = current_job()
    assert job is not None
    require_room(requests, job.local_world_size)
    cuda = requests[0].device == "cuda"
    device = torch.device("cuda", job.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    joined = not dist.is_initialized()
    if joined:
        init_process_group(
            replace(job, accelerator=requests[0].device, backend="nccl" if cuda else "gloo"), device=device
        )
    comm = world_communicator()
    hosts = ranks_per_host(comm)
    if hosts is None:
        raise MeasurementError("the ranks of a host do not follow each other: number them host by host.")
    found = [Measured(hosts, time_operations(comm, request)) for request in requests]
    if joined:
        destroy_process_group()
    return found


def run_ranks(fn: Callable[..., Any], world_size: int, *arguments: Any) -> Any:
    """``fn(rank, world_size, folder, *arguments)`` in fresh processes; what rank 0 returns.

    ``folder`` is an empty one for the rendezvous. Nothing that this process did with threads or CUDA reaches them.

    Raises:
        MeasurementError: a rank failed; its own traceback is on standard error.
    """
    # One machine is measured: loopback, and one compute thread per rank as workers of one machine have.
    before = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        with temporary_folder("measure") as folder:
            return _run_ranks(fn, world_size, str(folder), arguments)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


def _run_ranks(fn: Callable[..., Any], world_size: int, folder: str, arguments: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=_call, args=(fn, rank, world_size, folder, sender if rank == 0 else None, arguments))
        for rank in range(world_size)
    ]
    try:
        for process in ranks:
            process.start()
        sender.close()
        while not receiver.poll(0.2):
            if any(process.exitcode for process in ranks):
                raise MeasurementError(f"a rank of {world_size} failed: its traceback is above.")
        return receiver.recv()
    except EOFError:
        raise MeasurementError(f"a rank of {world_size} failed: its traceback is above.") from None
    finally:
        failed = any(process.exitcode for process in ranks)
        for process in ranks:
            process.join(0 if failed else 5)
            if process.is_alive():
                process.kill()
                process.join()
        receiver.close()


def _call(
    fn: Callable[..., Any], rank: int, world_size: int, folder: str, results: Connection | None, arguments: Any
) -> None:
    found = fn(rank, world_size, folder, *arguments)
    if results is not None:
        results.send(found)


def join_group(rank: int, world_size: int, folder: str, device: str) -> Communicator:
    """The communicator of ranks that :func:`run_ranks` started."""
    import torch
    import torch.distributed as dist

    from drivetrain.comm.communicator import Communicator

    torch.set_num_threads(1)
    place = torch.device("cpu")
    if device == "cuda":
        place = torch.device("cuda", rank)
        torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{Path(folder, 'store')}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
    )
    return Communicator(dist.group.WORLD, place)


def _measure_rank(rank: int, world_size: int, folder: str, requests: Sequence[Request]) -> list[list[Sample]]:
    import torch.distributed as dist

    comm = join_group(rank, world_size, folder, requests[0].device)
    samples = [time_operations(comm, request) for request in requests]
    with suppress(RuntimeError):  # what was measured is not lost to a peer that left first
        dist.destroy_process_group()
    return samples


def time_operations(comm: Communicator, request: Request) -> list[Sample]:
    """Time ``request`` on the ranks of ``comm``; the same samples on every rank."""
    clock = _Clock(comm, request.operations(comm, request.names))
    return [sample for size in request.sizes for sample in clock.samples(size, request)]


class _Clock:
    """Times operations on the ranks of a communicator, which all do the same in the same order."""

    def __init__(self, comm: Communicator, operations: dict[str, Operation]) -> None:
        import torch

        self.comm = comm
        self.operations = operations
        self.cuda = comm.device.type == "cuda"
        self.token = torch.zeros(1, device=comm.device)

    def samples(self, size: int, request: Request) -> list[Sample]:
        """Of all operations at one size in bytes."""
        import torch

        elements = max(1, math.ceil(size / 4 / self.comm.world_size)) * self.comm.world_size
        tensor = torch.zeros(elements, device=self.comm.device)
        for operation in self.operations.values():  # prepares buffers and connections
            for _ in range(2):
                operation(tensor)
        # Short operations are timed several at a time, all equally many: each finds threads awake that a single one
        # would have to wake. On a device operations follow each other without the host, as buckets of gradients do.
        count = 10 if size <= 2**16 else 4 if size <= 2**20 or self.cuda else 1
        times: dict[str, list[float]] = {name: [] for name in self.operations}
        # In another order each time, the same on all ranks, so that none always follows the same load.
        shuffled = random.Random(0)

        def repeat(names: Sequence[str], repeats: int) -> None:
            order = list(names)
            for _ in range(repeats):
                shuffled.shuffle(order)
                for name in order:
                    times[name].append(self._timed(self.operations[name], tensor, count))

        repeat(list(times), min(_FIRST, request.repeats))
        # Agreed upon, since every rank must repeat equally often.
        contenders = _contenders({name: self._slowest(mine) for name, mine in times.items()})
        further = int(request.seconds / (count * sum(contenders.values())))
        repeat(list(contenders), min(request.repeats - _FIRST, max(_FURTHER, further)))
        found = {name: self._slowest(mine) for name, mine in times.items()}
        return [
            Sample(name, tensor.nbytes, statistics.median(each), min(each), len(each)) for name, each in found.items()
        ]

    def _timed(self, operation: Operation, tensor: torch.Tensor, count: int) -> float:
        import torch
        import torch.distributed as dist

        dist.all_reduce(self.token, group=self.comm.group)  # all begin together
        if self.cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            operation(tensor)
        if self.cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / count

    def _slowest(self, times: list[float]) -> list[float]:
        import torch
        import torch.distributed as dist

        mine = torch.tensor(times, dtype=torch.float64, device=self.comm.device)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self.comm.group)
        return mine.tolist()


def _contenders(times: dict[str, list[float]]) -> dict[str, float]:
    """What may be the fastest of its operation, and what it is compared with: medians by name."""
    medians = {name: statistics.median(mine) for name, mine in times.items()}
    best: dict[str, float] = {}
    for name, seconds in medians.items():
        operation = name.rpartition("/")[0]
        best[operation] = min(seconds, best.get(operation, seconds))
    return {
        name: seconds
        for name, seconds in medians.items()
        if name.endswith("native") or min(times[name]) <= _HOPELESS * best[name.rpartition("/")[0]]
    }


def all_reduces(comm: Communicator, names: Sequence[str]) -> dict[str, Operation]:
    """The all-reduces of these names: ``"native"``, ``"auto"`` or a topology."""
    from functools import partial

    from drivetrain.comm.reduction import all_reduce_flat

    return {name: partial(_all_reduce, all_reduce_flat, comm, name) for name in names}


def _all_reduce(reduce: Callable[..., None], comm: Communicator, name: str, tensor: torch.Tensor) -> None:
    reduce(comm, tensor, "sum", name)
