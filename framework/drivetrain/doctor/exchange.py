"""Whether workers start, meet and sum: two processes, started as training starts them, and their speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from drivetrain.cli.accelerators import gpu_count
from drivetrain.doctor.finding import Finding, State
from drivetrain.errors import DrivetrainError
from drivetrain.launch import Job, destroy_process_group, init_process_group, launch

PART = "exchange"
SMALL, LARGE = 1, 25_000_000 // 4  # elements of fp32: for the latency, and for the bandwidth
REPEATS = {SMALL: 50, LARGE: 5}
LIMIT = 60.0  # seconds that a collective may take
UNKNOWN = "see the message; drivetrain train devices=1 may work meanwhile"


def exchange() -> Iterator[Finding]:
    """The all-reduce of two processes over each backend that may work here, and a computation on each GPU."""
    try:
        import torch.distributed as dist
    except Exception as error:  # a damaged installation may raise anything
        yield Finding(
            PART, "torch", "fail", _first_line(error), "install torch anew: pip install --force-reinstall torch"
        )
        return
    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding(PART, "gloo", "fail", "this build of torch has none", "install a build of torch with Gloo")
        return
    yield _all_reduce("gloo", "cpu", missing="fail")
    gpus = gpu_count()
    if not gpus:
        yield Finding(PART, "nccl", "note", "no GPU that torch can use")
        return
    yield from _computation(gpus)
    if not dist.is_nccl_available():
        yield Finding(PART, "nccl", "warn", "this build of torch has none", "install a build of torch with NCCL")
    elif gpus == 1:
        yield Finding(PART, "nccl", "note", "not tried: it takes two GPUs, and there is one")
    else:
        yield _all_reduce("nccl", "cuda", missing="warn")


def _all_reduce(backend: str, accelerator: str, missing: State) -> Finding:
    try:
        values = launch(measure, {}, workers=2, accelerator=accelerator, backend=backend, timeout=LIMIT)
    except DrivetrainError as error:
        return Finding(PART, backend, missing, _first_line(error), UNKNOWN)
    # What is waited for in training is the slower rank.
    latency, seconds = (max(times[number] for times in values.values()) for number in (0, 1))
    bandwidth = 4 * LARGE / seconds  # two ranks send the whole tensor each: bus and algorithm bandwidth are the same
    words = f"2 processes sum 4 bytes in {1e6 * latency:.0f} us and 25 MB at {bandwidth / 1e9:.2f} GB/s"
    figures = {"latency_s": latency, "bus_bandwidth_bytes_per_s": bandwidth}
    return Finding(PART, backend, "ok", words, figures=figures)


def measure(job: Job, payload: dict[str, Any]) -> list[float]:
    """Run by each of two workers: median seconds of an all-reduce of one element and of 25 MB.

    Raises:
        RuntimeError: a sum is wrong.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", job.local_rank) if job.accelerator == "cuda" else torch.device("cpu")
    init_process_group(job, device=device)
    medians = []
    for numel, repeats in REPEATS.items():
        tensor = torch.empty(numel, device=device)
        times = []
        for _ in range(repeats + 1):
            tensor.fill_(job.rank + 1.0)
            _settle(device)
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            _settle(device)
            times.append(time.perf_counter() - began)
        if tensor[0].item() != 3.0 or tensor[-1].item() != 3.0:
            raise RuntimeError(f"1 + 2 over {job.backend} came out as {tensor[0].item()}")
        medians.append(statistics.median(times[1:]))
    dist.barrier()  # nobody hangs up on one who still receives
    destroy_process_group()
    return medians


def _settle(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _computation(gpus: int) -> Iterator[Finding]:
    """In a worker, so that this process stays free of CUDA and can fork."""
    try:
        [described] = launch(compute, {"gpus": gpus}, workers=1, accelerator="cuda", timeout=LIMIT).values()
    except DrivetrainError as error:
        yield Finding(PART, "cuda", "warn", _first_line(error), "see that the driver is as new as torch's CUDA needs")
        return
    for number, words in enumerate(described):
        yield Finding(PART, f"cuda:{number}", "ok", words)


def compute(job: Job, payload: dict[str, Any]) -> list[str]:
    """Run by a worker: multiply on every GPU and say what it is.

    Raises:
        RuntimeError: a product is wrong, or CUDA failed.
    """
    import torch

    described = []
    for number in range(payload["gpus"]):
        x = torch.ones(64, 64, device=f"cuda:{number}")
        if (x @ x).sum().item() != 64.0**3:
            raise RuntimeError(f"cuda:{number} multiplies wrongly")
        known = torch.cuda.get_device_properties(number)
        described.append(f"{known.name}, {known.total_memory / 2**30:.0f} GiB, computes")
    return described


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
