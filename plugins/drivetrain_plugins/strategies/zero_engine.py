"""Starting DeepSpeed as a guest: quietly, on the job's own process group, and without its compiler."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from drivetrain.launch import Job


def start(job: Job) -> Any:
    """The ``deepspeed`` module, ready for ``initialize``; a job of one worker gets a group of one.

    At its start on the CPU, DeepSpeed would compile a shared-memory transport (minutes, and a compiler): Gloo does that
    work, so it is told that the transport is not there.
    """
    former = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = "cuda" if job.accelerator == "cuda" else "cpu"
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        get_accelerator()
    finally:
        if former is None:
            del os.environ["DS_ACCELERATOR"]
        else:
            os.environ["DS_ACCELERATOR"] = former
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        dist.init_process_group(job.backend, store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(
        dist_backend=job.backend, auto_mpi_discovery=False, verbose=False, rank=job.rank, world_size=job.world_size
    )
    return deepspeed


def build(deepspeed: Any, model: nn.Module, optimizer: Optimizer, options: Any) -> Any:
    """An engine that steps when it is told to: windows of any length, losses already weighted, clipping per step."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": options.stage,
            "reduce_bucket_size": options.bucket_size,
            "stage3_param_persistence_threshold": options.persistence_threshold,
            "overlap_comm": False,
        },
    }
    # DeepSpeed reads the local rank from the environment, where a lone worker has none.
    lone = "LOCAL_RANK" not in os.environ
    if lone:
        os.environ["LOCAL_RANK"] = "0"
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    finally:
        if lone:
            del os.environ["LOCAL_RANK"]
    return engine


def full_parameters(model: nn.Module) -> None:
    """Give ``model`` ordinary parameters again in the place of those that stage 3 took over and that are gathered."""
    made: dict[int, nn.Parameter] = {}
    for child in model.modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is not None and hasattr(parameter, "ds_id"):
                if id(parameter) not in made:
                    data = parameter.data.detach().clone()
                    made[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
                child._parameters[name] = made[id(parameter)]
        child._parameters = dict(child._parameters)


