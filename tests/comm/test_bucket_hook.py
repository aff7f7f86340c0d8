"""The hook inside real DistributedDataParallel: same gradients, overlap, errors of their own type, a clean end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch

# DistributedDataParallel imports it at its first use, which takes seconds: once here instead of in every rank.
import torch._dynamo
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.comm.bucket_hook import BucketTransform, ScheduledAllReduce
from drivetrain.comm.communicator import CommunicationError, Communicator
from drivetrain.comm.topologies.ring import ring
from tests.patience import SOON


class Boom(Exception):
    pass


def network() -> nn.Module:
    torch.manual_seed(3)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers).double()


def wrapped() -> DistributedDataParallel:
    # 0.02 MiB holds less than two of the layers (33 kB each): several buckets.
    return DistributedDataParallel(network(), bucket_cap_mb=0.02)


def backward(model: nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    model.zero_grad()
    data = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
    model(data).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def compare_gradients(comm: Communicator) -> tuple[float, float, int, list[float]]:
    default, ours = wrapped(), wrapped()
    worst = serial = 0.0
    with ScheduledAllReduce(ring(comm.world_size), comm, trace=True) as hook:
        ours.register_comm_hook(hook, ScheduledAllReduce.hook)
        for step in range(3):
            theirs = backward(default, comm.rank, step)
            mine = backward(ours, comm.rank, step)
            each = [backward(network(), rank, step) for rank in range(comm.world_size)]
            means = [torch.stack(parts).mean(0) for parts in zip(*each, strict=True)]
            assert len(mine) == len(theirs) == len(means) == 8
            for a, b, mean in zip(mine, theirs, means, strict=True):
                worst = max(worst, float((a - b).abs().max() / b.abs().max()))
                serial = max(serial, float((a - mean).abs().max() / mean.abs().max()))
        hook.raise_if_failed()
        assert hook.trace is not None
        buckets = len({event.bucket for event in hook.trace})
    bits = [float(gradient.sum()) for gradient in mine]
    return worst, serial, buckets, bits


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_same_gradients_as_default_and_serial_mean(world_size: int) -> None:
    results = ranks.run(compare_gradients, world_size)
    for worst, serial, buckets, bits in results:
        assert worst <= 1e-14 and serial <= 1e-14
        assert buckets >= 3
        assert bits == results[0][3]


class Held(torch.autograd.Function):
    """Identity whose backward calls ``until`` first."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, until: Callable[[], None]) -> torch.Tensor:
        context.until = until
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.until()
        return gradient, None


class HeldNetwork(nn.Module):
    """The backward of its first layer, which comes last, waits for ``until``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64).double() for _ in range(4))
        self.until: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Held.apply(self.layers[0](x), self.until)
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return x


def overlap(comm: Communicator) -> tuple[list[int], float, float]:
    network = HeldNetwork()
    model = DistributedDataParallel(network, bucket_cap_mb=0.02)
    with ScheduledAllReduce(ring(comm.world_size), comm, trace=True) as hook:
        model.register_comm_hook(hook, ScheduledAllReduce.hook)
        backward(model, comm.rank, 0)
        assert hook.trace is not None
        hook.trace.clear()
        trace, deadline = hook.trace, time.monotonic() + SOON

        def until() -> None:
            while not any(event.what == "started" for event in trace) and time.monotonic() < deadline:
                time.sleep(0.01)

        network.until = until
        backward(model, comm.rank, 1)
        times = {(event.bucket, event.what): event.seconds for event in hook.trace}
    order = [event.bucket for event in hook.trace if event.what == "started"]
    return order, times[0, "started"], max(at for (_, what), at in times.items() if what == "ready")


def test_first_bucket_is_under_way_before_the_last_is_ready() -> None:
    for order, first_started, last_ready in ranks.run(overlap, 2):
        assert order == sorted(order) and len(order) >= 3
        assert first_started < last_ready


def fail_in_thread(comm: Communicator) -> tuple[str, str, float, bool, str]:
    def broken(bucket: torch.Tensor) -> torch.Tensor:
        raise Boom("no room")

    transform = BucketTransform(encode=broken, decode=lambda summed, bucket: summed)
    hook = ScheduledAllReduce(ring(comm.world_size), comm, transform=transform)
    model = wrapped()
    model.register_comm_hook(hook, ScheduledAllReduce.hook)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        backward(model, comm.rank, 0)
    with pytest.raises(Boom) as real:
        hook.raise_if_failed()
    hook.close()
    hook.close()
    alive = "gradient buckets" in " ".join(thread.name for thread in threading.enumerate())
    with pytest.raises(CommunicationError, match="closed"):
        hook.submit(0, torch.ones(3))
    return type(caught.value).__name__, str(real.value), time.monotonic() - started, alive, hook._thread.name


def test_error_in_the_thread_surfaces_with_its_type_and_ends_fast() -> None:
    for _, message, seconds, alive, name in ranks.run(fail_in_thread, 2):
        assert message == "no room" and seconds < SOON and not alive and "gradient buckets" in name


def peer_never_comes(comm: Communicator) -> tuple[float, bool, str, float]:
    hook = ScheduledAllReduce(ring(comm.world_size), comm)
    seconds, failed = 0.0, ""
    if comm.rank == 0:
        future = hook.submit(0, torch.ones(1000))
        time.sleep(0.2)
        started = time.monotonic()
        hook.close()
        seconds = time.monotonic() - started
        with pytest.raises(RuntimeError):
            future.wait()
        failed = type(hook.error).__name__
    else:
        hook.close()
    # Other groups still work: closing took nothing else with it.
    return seconds, hook._thread.is_alive(), failed, comm.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("world_size", [2, 3])
def test_close_ends_a_thread_that_waits_for_a_peer(world_size: int) -> None:
    results = ranks.run(peer_never_comes, world_size)
    seconds, _, failed, _ = results[0]
    assert seconds < SOON and failed == "CollectiveFailed"
    assert [(alive, total) for _, alive, _, total in results] == [(False, world_size)] * world_size


def transformed(comm: Communicator) -> float:
    """The seam: what is summed is not the bucket."""
    transform = BucketTransform(encode=lambda bucket: bucket.double() * 2, decode=lambda s, b: b.copy_(s / 2))
    with ScheduledAllReduce(ring(comm.world_size), comm, transform=transform) as hook:
        averaged = hook.submit(0, torch.full((5,), float(comm.rank))).wait()
    assert averaged.dtype == torch.float32
    return averaged.sum().item()


def test_transform_wraps_the_sum() -> None:
    assert ranks.run(transformed, 3) == [5.0] * 3
