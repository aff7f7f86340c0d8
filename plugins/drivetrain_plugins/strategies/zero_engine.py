"""Starting DeepSpeed as a guest: quietly, on the job's own process group, and without its compiler."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.launch import Job, destroy_process_group, init_group_of_one


class Guest:
    """DeepSpeed for as long as a job lasts; ``leave`` takes back what it put into the process.

    Attributes:
        deepspeed: the module, ready for ``initialize``.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        variables = {
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # what importing it would set
            "DS_ACCELERATOR": "cuda" if job.accelerator == "cuda" else "cpu",
            "LOCAL_RANK": str(job.gpu),  # it is taken for the number of the GPU; srun gives none
        }
        self._former = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        self._filters = list(warnings.filters)
        # torch renamed two collectives, and warns at each call of the old names.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        import deepspeed
        from deepspeed.utils import groups

        self.deepspeed = deepspeed
        self._groups = {name: copy(value) for name, value in vars(groups).items() if _is_state(name, value)}
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # At its start DeepSpeed would try its kernels on the compiler, and on the CPU build a transport through shared
        # memory, for minutes. Gloo does that work, and torch's own optimizer steps: there are none, it is told.
        deepspeed.ops.__compatible_ops__ = {}
        _import_muon()
        # It wants a process group of one worker, too; a script may make its own between two stages. Not made before the
        # import, which takes the group that is there for a default of functions, for ever.
        self._lone_group = job.world_size == 1 and init_group_of_one(job, device)
        deepspeed.init_distributed(
            dist_backend=job.backend, auto_mpi_discovery=False, verbose=False, rank=job.rank, world_size=job.world_size
        )

    def leave(self, failed: bool) -> None:
        """No collective. DeepSpeed keeps groups of a job that has ended; a next job in this process makes its own."""
        from deepspeed.comm import comm
        from deepspeed.runtime import torch_autocast
        from deepspeed.utils import groups

        comm.cdb = None
        torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None
        vars(groups).update(self._groups)
        warnings.filters[:] = self._filters  # type: ignore[index]
        for name, value in self._former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self._lone_group:
            destroy_process_group(failed=failed)
            gc.collect()  # an engine, a ring of references, holds groups, whose threads and port would stay with it


def _is_state(name: str, value: Any) -> bool:
    return value is None or (isinstance(value, dict) and name.isupper())


def build(
    deepspeed: Any, model: nn.Module, optimizer: Optimizer, stage: int, options: Any, compute: torch.dtype | None
) -> Any:
    """An engine that steps when it is told to: windows of any length, losses already weighted, clipping per step.

    Args:
        compute: the dtype that layers of matrices exchange weights and gradients in, None for their own.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": options.bucket_size,
            "stage3_param_persistence_threshold": options.persistence_threshold,
            # Reduced while backward goes on, which pays where a step is a chain of small messages.
            "overlap_comm": stage == 3,
        },
    }
    if compute is not None:
        config["torch_autocast"] = {"enabled": True, "dtype": str(compute).removeprefix("torch.")}
    with _broadcasting_ours(), _stepping_by_ours():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


@contextmanager
def _stepping_by_ours() -> Iterator[None]:
    """While it lasts an engine keeps the Adagrad that it is given. It would step by one of its own instead, which has
    neither the groups nor the rates that schedules give them, for it has states before the first step."""
    former = torch.optim.Adagrad
    torch.optim.Adagrad = NoneType  # type: ignore[misc,assignment]  # which no optimizer is
    try:
        yield
    finally:
        torch.optim.Adagrad = former  # type: ignore[misc]


@contextmanager
def _broadcasting_ours() -> Iterator[None]:
    """While it lasts an engine begins with the first rank's weights whatever their shape: its own broadcast looks at
    them as bytes, which neither a single number without a dimension nor a transposed matrix can be."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    former = DeepSpeedEngine._broadcast_model
    DeepSpeedEngine._broadcast_model = lambda engine: _broadcast(engine.module)
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = former


def _broadcast(model: nn.Module) -> None:
    for parameter in model.parameters():
        values = parameter.detach().contiguous()
        torch.distributed.broadcast(values, 0)
        if values.data_ptr() != parameter.data_ptr():
            parameter.detach().copy_(values)


def _import_muon() -> None:
    """An optimizer of DeepSpeed's own that its engine asks about. Its functions stay uncompiled: importing them would
    start torch's compiler, for seconds, in every worker."""
    from deepspeed.runtime import compiler

    former = compiler.compile
    compiler.compile = lambda *args, **kwargs: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = former


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
