"""The communicator of all ranks that this process belongs to, found without being told."""

from __future__ import annotations

import torch
import torch.distributed as dist

from drivetrain.comm.communicator import Communicator


def world_communicator() -> Communicator:
    """All ranks of torch's default process group; a world of one rank where there is none.

    Plain data travels over this rank's current GPU under NCCL, else over the CPU.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Communicator()
    nccl = "nccl" in dist.get_backend()
    return Communicator(dist.group.WORLD, torch.device("cuda", torch.cuda.current_device()) if nccl else "cpu")
