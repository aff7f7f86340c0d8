"""Where a run takes place: accelerator, backend, number of workers, strategy. CUDA is not touched here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from drivetrain import registry
from drivetrain.arguments import listed_devices, resolve_devices
from drivetrain.declaration import Declaration
from drivetrain.errors import ConfigurationError
from drivetrain.launch import Job, current_job
from drivetrain.parts import strategy_options


@dataclass(frozen=True)
class Placement:
    """The decisions.

    Attributes:
        accelerator: ``"cpu"`` or ``"cuda"``.
        job: the job that this process was started in, None when none was.
        devices: workers on this node.
        world_size: workers on all nodes.
        options: the strategy's options.
        gpus: which GPUs the workers of this node use, where that was said.
    """

    accelerator: str
    backend: str
    job: Job | None
    devices: int
    num_nodes: int
    world_size: int
    declaration: Declaration
    options: Any
    gpus: tuple[int, ...] = ()

    @property
    def device(self) -> torch.device:
        """This process's in the job, or that of this node's first worker."""
        if self.accelerator == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", (self.job or Job(gpus=self.gpus)).gpu)


def place(
    accelerator: str,
    strategy: Any,
    devices: Any,
    num_nodes: int,
    backend: str | None,
    cpu_workers: int = 2,
    timeout: float = Job.timeout,
) -> Placement:
    """Decide from the Trainer's arguments, the GPUs that are present and the job that may have been started;
    ``cpu_workers`` is what several workers are by default where there are no GPUs."""
    gpus = 0 if accelerator == "cpu" else torch.cuda.device_count()  # through NVML
    if accelerator in ("gpu", "cuda") and gpus == 0:
        raise ConfigurationError(f"accelerator={accelerator}: there is no GPU here, use accelerator=cpu.")
    kind = "cuda" if gpus else "cpu"
    backend = backend or ("nccl" if gpus else "gloo")
    if backend == "nccl" and not gpus:
        raise ConfigurationError("backend=nccl needs GPUs: use backend=gloo.")
    job = current_job(accelerator=kind, backend=backend, timeout=timeout)
    declaration, given = _declaration(strategy, many=job.world_size > 1 if job else _several(devices, gpus))
    options = strategy_options(declaration, given)
    default = 1 if declaration.support.max_world_size == 1 else gpus or cpu_workers
    if job is None:
        count = resolve_devices(devices, gpus, kind, default)
        gpus_named = _named(devices, kind)
        return Placement(kind, backend, None, count, num_nodes, count * num_nodes, declaration, options, gpus_named)
    count = resolve_devices(devices, gpus, kind, job.local_world_size)
    if count != job.local_world_size:
        raise ConfigurationError(
            f"devices={devices}: the job that was started has {job.local_world_size} workers on this node: leave"
            " devices out or start that many."
        )
    job = replace(job, gpus=_named(devices, kind))
    return Placement(kind, backend, job, count, job.num_nodes, job.world_size, declaration, options, job.gpus)


def _named(devices: Any, accelerator: str) -> tuple[int, ...]:
    return tuple(listed_devices(devices) or ()) if accelerator == "cuda" else ()


def _several(devices: Any, gpus: int) -> bool:
    """Whether that may be more than one worker, where nobody chose a strategy."""
    if devices in ("auto", None):
        return gpus > 1
    listed = listed_devices(devices)
    return len(listed) > 1 if listed is not None else devices not in (1, "1")


def _declaration(strategy: Any, many: bool) -> tuple[Declaration, dict[str, Any]]:
    """The strategy's declaration and the options that came with its name."""
    if isinstance(strategy, Declaration):
        return strategy, {}
    options: dict[str, Any] = {}
    if isinstance(strategy, Mapping):
        options = {key: value for key, value in strategy.items() if key != "name"}
        strategy = strategy.get("name", "auto")
    if strategy == "auto":
        strategy = "ddp" if many else "single"
    found = registry.load("strategies", strategy)
    return (found if isinstance(found, Declaration) else found.declaration), options
