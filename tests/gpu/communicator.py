"""The Communicator over NCCL, run by hand: ``python -m tests.gpu.communicator [RANKS]``, which are as many as there are
GPUs, or share one (:mod:`tests.gpu.one_gpu`).

Every operation on host tensors and arrays, which travel through the GPU, as the tests of the CPU judge them; then on
tensors of the GPU. Each line ends with what was seen; the command exits with 1 if anything is not as it should be.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "comm"))

import test_messages as messages
import test_operations as operations

from drivetrain.comm import CommunicationError, Communicator
from tests.gpu import one_gpu


def on_device(comm: Communicator) -> str:
    """In the caller's own storage on the GPU; strided; by schedules; integers widened."""
    n, rank = comm.world_size, comm.rank
    for algorithm in operations.ALGORITHMS:
        for op in ("sum", "average", "min", "max", "product"):
            parts = [operations.part(r, (3, 5), torch.float32) for r in range(n)]
            mine = parts[rank].to(comm.device).t()
            before = mine.data_ptr()
            assert comm.all_reduce(mine, op, algorithm) is mine and mine.data_ptr() == before  # type: ignore[arg-type]
            assert operations.agree(mine.t().cpu(), operations.expected(op, parts)), (algorithm, op)
    whole = torch.full((4,), 2**30, dtype=torch.int32, device=comm.device)
    assert comm.all_reduce(whole).tolist() == [n * 2**30] * 4
    following, previous = (rank + 1) % n, (rank - 1) % n
    sent, into = torch.full((5,), float(rank), device=comm.device), torch.empty(5, device=comm.device)
    if rank % 2:
        comm.recv(into, previous)
        comm.send(sent, following)
    else:
        comm.send(sent, following)
        comm.recv(into, previous)
    assert into.tolist() == [float(previous)] * 5 and into.is_cuda
    with pytest.raises(CommunicationError, match="NCCL has no such receive"):
        comm.recv(into)
    return ", ".join(operations.ALGORITHMS)


def profiled(comm: Communicator) -> str:
    """The device's own time, read without waiting for it."""
    large = torch.ones(2**26, device=comm.device)
    comm.all_reduce(large)
    comm.enable_profiling()
    comm.statistics.reset()
    for _ in range(10):
        comm.all_reduce(large)
        comm.all_reduce(large, algorithm="ring")
    torch.cuda.synchronize()
    rows = comm.stats()["operations"]
    comm.disable_profiling()
    bus = {name: rows[name]["bus_bandwidth"] / 1e9 for name in ("all_reduce", "ring")}
    assert all(10 < rate < 2000 for rate in bus.values()), bus
    return ", ".join(f"{name} {rate:.0f} GB/s on the bus" for name, rate in bus.items())


def parted(comm: Communicator) -> str:
    """Groups of some ranks, which the others know nothing of, from the whole and from each other."""
    n, rank = comm.world_size, comm.rank
    first = comm.split(0 if rank == 0 else None, label="first")
    assert (first is None) == (rank > 0)
    half = comm.split(rank % 2, key=-rank)
    assert half is not None and half.world_size == len(range(rank % 2, n, 2))
    one = torch.ones(3, device=comm.device)
    if rank % 2 == 0:  # these part again by themselves
        quarter = half.split(0)
        assert quarter is not None and quarter.all_reduce(one.clone()).tolist() == [float(half.world_size)] * 3
    assert half.all_reduce(one.clone()).tolist() == [float(half.world_size)] * 3
    assert comm.by_host("here").inside.all_reduce(one.clone()).tolist() == [float(n)] * 3
    whole = comm.sub(range(n), "whole")
    assert whole is not None and whole.all_reduce(one).tolist() == [float(n)] * 3
    return f"{n} ranks in halves"


def barrier(comm: Communicator) -> str:
    """Who did not arrive is named over NCCL too. Last, for its group is of no use afterwards."""
    own = comm.sub(range(comm.world_size), "own")
    assert own is not None
    own.barrier(20)
    said = ""
    if comm.rank == 0:
        with pytest.raises(CommunicationError, match=r"rank 1(, 2|, 3)* did not arrive") as error:
            own.barrier(timeout=1.0)
        said = str(error.value)
    own.abort()
    return said


def worker(rank: int, world_size: int, gpu: int, store: str) -> None:
    os.environ["LOCAL_RANK"] = str(gpu)
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    place: dict[str, Any] = {"init_method": f"file://{store}", "rank": rank, "world_size": world_size}
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=device, **place)  # bound, as a Trainer's
    assert dist.group.WORLD is not None
    comm = Communicator(dist.group.WORLD, device)
    checks: list[tuple[str, Callable[[Communicator], Any]]] = [
        ("groups", parted),
        ("reductions", lambda c: operations.reductions(c, ["native", "ring"])[:8]),
        ("movements", operations.movements),
        ("uneven", operations.uneven),
        ("containers", operations.containers),
        ("refusals", operations.refused),
        ("objects", lambda c: len(messages.objects(c))),
        ("on the device", on_device),
        *([("profiled", profiled)] if torch.cuda.device_count() >= world_size else []),
        ("barrier", barrier),
    ]
    for name, check in checks:
        try:
            seen = check(comm)
        except BaseException:
            print(f"{name} on rank {rank}: FAILED\n{traceback.format_exc()}", flush=True)
            os._exit(1)  # the other rank waits in what this one left
        if rank == 0:
            print(f"{name}: {seen if seen is not None else 'as on the CPU'}", flush=True)
    os._exit(0)


def of_its_own(rank: int, world_size: int, store: str) -> None:
    worker(rank, world_size, rank, store)


def main(arguments: list[str]) -> int:
    if len(arguments) == 2:  # one of several that share a GPU
        worker(int(os.environ["RANK"]), int(arguments[0]), 0, arguments[1])
    gpus = torch.cuda.device_count()
    count = int(arguments[0]) if arguments else gpus
    with tempfile.TemporaryDirectory() as folder:
        if count <= gpus:
            mp.spawn(of_its_own, (count, f"{folder}/store"), nprocs=count)
            return 0
        command = [sys.executable, "-m", __spec__.name, str(count), f"{folder}/store"]
        return max(abs(process.wait()) for process in one_gpu.start(count, command))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
