"""The communicator of all ranks that this process belongs to, found without being told."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from drivetrain.comm.communicator import Communicator
from drivetrain.launch import current_job, init_process_group


def world_communicator() -> Communicator:
    """All ranks of torch's default process group; a world of one rank where there is none.

    Plain data travels over this rank's current GPU under NCCL, else over the CPU.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Communicator()
    nccl = "nccl" in dist.get_backend()
    return Communicator(dist.group.WORLD, torch.device("cuda", torch.cuda.current_device()) if nccl else "cpu")


def join_world() -> Communicator:
    """:func:`world_communicator` without a Trainer, under torchrun, srun or mpirun: joins the job first if
    nobody has, with NCCL where every rank of this host can have a GPU, else with Gloo.

    Who joined ends with ``drivetrain.launch.destroy_process_group()``. A process that belongs to no job is a world of
    one rank.

    Raises:
        ConfigurationError: the launcher's variables are ill-formed, or the job could not be joined.
    """
    job = None if dist.is_initialized() else current_job()
    if job is not None and job.world_size > 1:
        device = torch.device("cpu")
        if torch.cuda.device_count() >= job.local_world_size:
            job = replace(job, accelerator="cuda", backend="nccl")
            device = torch.device("cuda", job.local_rank)
        init_process_group(job, device=device)
    return world_communicator()


def hang_up() -> None:
    """Close this process's connections of all groups, without a word to the other ranks, who may wait for it. An engine
    whose pass was cut short keeps its group, and with it the connections, when all groups are taken down."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == dist.Backend.GLOO:
            Communicator(group, torch.device("cpu")).abort()
