"""Where this process stands in its job, if it is in one. Importing and calling it imports no torch."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from drivetrain.cli.accelerators import gpu_count
from drivetrain.launch.environment import current_job
from drivetrain.launch.job import Job


def get_distributed_info() -> dict[str, Any]:
    """This process's place, as plain data; outside of any job it is rank 0 of 1.

    Keys:
        rank, world_size: among all processes of the job.
        local_rank, local_world_size: among those of this node.
        node, num_nodes: number of this node, and of all.
        host: name of this machine.
        launcher: ``local`` (drivetrain's own), ``torchrun``, ``slurm``, ``mpi``, or ``none``.
        initialized: whether torch's default process group exists.
        backend: of that group; before it exists the one that the job would have.
        device: ``cpu``, or ``cuda:N`` where this process computes on a GPU or its job would give it one.
        master_addr, master_port: where the job's store listens; port 0 where there is none.
        pid: of this process.

    Raises:
        ConfigurationError: the variables of a launcher are there but ill-formed.
    """
    job = current_job()
    known = job or Job()
    rank, world_size, backend = known.rank, known.world_size, _backend(job)
    # Asked only where somebody has imported it: who has not cannot have made a process group.
    torch = sys.modules.get("torch")
    distributed = sys.modules.get("torch.distributed")
    device = _device(torch, job)
    initialized = bool(distributed and distributed.is_available() and distributed.is_initialized())
    if initialized:
        assert distributed is not None
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        backend = _backend_in_use(distributed, device)
    return {
        "rank": rank,
        "world_size": world_size,
        "local_rank": known.local_rank,
        "local_world_size": known.local_world_size,
        "node": known.node_rank,
        "num_nodes": known.num_nodes,
        "host": socket.gethostname(),
        "launcher": "none" if job is None else known.origin,
        "initialized": initialized,
        "backend": backend,
        "device": device,
        "master_addr": known.master_addr,
        "master_port": known.master_port,
        "pid": os.getpid(),
    }


def _backend(job: Job | None) -> str:
    if job is not None and job.origin in ("local", "inline"):
        return job.backend
    return "nccl" if gpu_count() else "gloo"


def _backend_in_use(distributed: Any, device: str) -> str:
    """A group that was made without naming a backend has one for each kind of device."""
    by_device = dict(part.split(":") for part in distributed.get_backend_config().split(",") if ":" in part)
    return str(by_device.get(device.partition(":")[0], distributed.get_backend()))


def _device(torch: Any, job: Job | None) -> str:
    if torch is not None and torch.cuda.is_initialized():
        return f"cuda:{torch.cuda.current_device()}"
    if job is not None and job.origin in ("local", "inline"):
        return f"cuda:{job.gpu}" if job.accelerator == "cuda" else "cpu"
    local_rank = 0 if job is None else job.local_rank
    return f"cuda:{local_rank}" if local_rank < gpu_count() else "cpu"
