"""Each compressor on real ranks: what it sends, what it owes, and that nothing is lost in between."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain import registry
from drivetrain.comm.communicator import Communicator
from drivetrain.comm.topologies.ring import ring
from drivetrain.compressor import Bucket, Compressor, Segment, compression_of
from drivetrain_plugins.compression.error_feedback import add_owed, keep_owed
from drivetrain_plugins.compression.hook import CompressedAverage, ScheduledTransport
from drivetrain_plugins.compression.memory import StepMemory
from tests.distributed import run_ranks

LOSSY = [name for name in registry.names("compressors") if name != "none"]
SHAPES = {"a.weight": (12, 9), "a.bias": (12,), "b.weight": (5, 4, 3), "scale": ()}
STEPS = 8


def built(name: str, **options: Any) -> Compressor:
    declaration, filled = compression_of({"name": name, **options})
    made = declaration.build(filled)
    assert made is not None
    return made


def segments() -> tuple[Segment, ...]:
    found, at = [], 0
    for name, shape in SHAPES.items():
        size = torch.Size(shape).numel()
        found.append(Segment(name, at, at + size, shape))
        at += size
    return tuple(found)


def gradient(rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(segments()[-1].stop, generator=torch.Generator().manual_seed(97 * step + rank))
    return (drawn * 10.0 ** (drawn.abs() - 2)).to(dtype)  # several magnitudes in one bucket


def _average(rank: int, world_size: int, name: str, over_ring: bool, dtype: torch.dtype) -> dict[str, Any]:
    communicator = Communicator(dist.group.WORLD)
    transport = ScheduledTransport(communicator, ring(world_size)) if over_ring else communicator
    compressor, memory, parts = built(name), StepMemory(), segments()
    total = sent_total = torch.zeros(parts[-1].stop, dtype=torch.float64)
    mismatch, means = 0.0, []
    for step in range(STEPS):
        flat = gradient(rank, step, dtype)
        total = total + flat.double()
        add_owed(flat, parts, memory)
        given = flat.clone()
        averaged = compressor.average(Bucket(flat, parts, memory.step, memory), transport)
        assert torch.equal(flat, given), "a compressor must leave the bucket as it is"
        keep_owed(flat, averaged.sent, parts, memory)
        memory.settle(True)
        owed = torch.cat([_owed(memory, part) for part in parts])
        mismatch = max(mismatch, float((averaged.sent + owed - flat).abs().max() / flat.abs().max()))
        sent_total = sent_total + averaged.sent.double()
        summed = communicator.all_reduce(averaged.sent.double())
        means.append((averaged.mean, summed / world_size))
    return {
        "mean": torch.stack([mean for mean, _ in means]),
        "of_sent": torch.stack([of_sent for _, of_sent in means]),
        "mismatch": mismatch,
        "lost": float((sent_total + owed.double() - total).abs().max()),
        "owed": float(owed.abs().max()),
    }


def _owed(memory: StepMemory, part: Segment) -> torch.Tensor:
    value = memory.get("owed", part.name)
    assert value is not None
    return value


@pytest.mark.parametrize("over_ring", [False, True], ids=["native", "ring"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", LOSSY)
def test_sent_and_owed_are_the_gradients(name: str, world_size: int, over_ring: bool) -> None:
    results = run_ranks(_average, world_size, name, over_ring, torch.float64)
    # Sums of 16-bit numbers are rounded on the way: 2 (N - 1) roundings of a sum, relative to the largest entry.
    rounding = {"fp16": 2.0**-11, "bf16": 2.0**-8}.get(name, 1e-15) * 2 * (world_size - 1)
    for result in results:
        assert torch.equal(result["mean"], results[0]["mean"])
        error = (result["mean"] - result["of_sent"]).abs().amax(dim=1)
        assert bool((error <= rounding * result["of_sent"].abs().amax(dim=1) + 1e-15).all())
        assert result["lost"] < 1e-12
        assert result["owed"] > 0, "nothing was compressed"
        # The difference to a neighbouring number of the format is itself representable, so nothing is rounded.
        assert result["mismatch"] <= (1e-15 if name == "powersgd" else 0.0)


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "topk"])
def test_the_debt_is_exact_in_fp32_too(name: str) -> None:
    assert [result["mismatch"] for result in run_ranks(_average, 2, name, False, torch.float32)] == [0.0, 0.0]


def _not_finite(rank: int, world_size: int, name: str) -> list[bool]:
    communicator, parts, found = Communicator(dist.group.WORLD), segments(), []
    for bad in (float("inf"), float("-inf"), float("nan")):
        compressor = built(name)
        flat = gradient(rank, 0, torch.float32)
        if rank == 1:
            flat[3] = bad
        found.append(bool(compressor.average(Bucket(flat, parts, 0, StepMemory()), communicator).mean.isfinite().all()))
    return found


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_not_finite_on_one_rank_is_not_finite_on_all(name: str) -> None:
    assert run_ranks(_not_finite, 2, name) == [[False, False, False]] * 2


def _cast(rank: int, world_size: int, name: str, values: list[float]) -> torch.Tensor:
    flat = torch.tensor(values, dtype=torch.float64) * (rank + 1)
    bucket = Bucket(flat, (Segment("a", 0, len(values), (len(values),)),), 0, StepMemory())
    return built(name).average(bucket, Communicator(dist.group.WORLD)).mean


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_numbers_of_the_format_arrive_as_they_are(name: str, world_size: int) -> None:
    values = [1.0, -3.5, 0.0, 2.0**-9, 40.0, 2.0**-20]
    expected = torch.tensor(values, dtype=torch.float64) * ((1 + world_size) / 2)
    for mean in run_ranks(_cast, world_size, name, values):
        assert torch.equal(mean, expected)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_casts_neither_overflow_nor_vanish(name: str) -> None:
    values = [1e6, 3e38, 1e300]  # beyond the range of fp16, of a sum in bfloat16, of bfloat16
    for value in values:
        mean = run_ranks(_cast, 2, name, [value, -value / 2])[0]
        assert mean.tolist() == pytest.approx([1.5 * value, -0.75 * value], rel=2**-7)
    assert run_ranks(_cast, 2, name, [1e-30])[0].item() == pytest.approx(1.5e-30, rel=2**-7)
    assert run_ranks(_cast, 2, name, [0.0])[0].item() == 0.0


def _powers(rank: int, world_size: int, options: dict[str, Any], matrices: int) -> list[float]:
    """Relative distance of the mean to the true mean, step by step, for one gradient of rank 3."""
    generator = torch.Generator().manual_seed(4)
    m = torch.randn(12, 3, generator=generator).double() @ torch.randn(3, 9, generator=generator).double()
    flat, found, memory = (m * (1 + rank)).reshape(-1), [], StepMemory()
    compressor = built("powersgd", min_compression_rate=0, **options)
    for _ in range(matrices):
        bucket = Bucket(flat, (Segment("a.weight", 0, 108, (12, 9)),), memory.step, memory)
        mean = compressor.average(bucket, Communicator(dist.group.WORLD)).mean
        memory.settle(True)
        true = m.reshape(-1) * (1 + world_size) / 2
        found.append(float((mean - true).norm() / true.norm()))
    return found


def test_powersgd_is_exact_at_the_rank_of_the_gradient_and_warms_up() -> None:
    assert max(run_ranks(_powers, 2, {"rank": 3}, 2)[0]) < 1e-13
    assert max(run_ranks(_powers, 2, {"rank": 9}, 2)[0]) < 1e-13
    distances = run_ranks(_powers, 2, {"rank": 2, "warmup_steps": 2}, 7)[0]
    assert distances[:2] == [0.0, 0.0]
    assert distances[2] > distances[-1] > 0.01, "the power method goes on from the last step's factor"


def _orthogonal(rank: int, world_size: int) -> float:
    flat, memory = gradient(0, 0, torch.float64)[:108], StepMemory()
    bucket = Bucket(flat, (Segment("a.weight", 0, 108, (12, 9)),), 0, memory)
    sent = built("powersgd", rank=2).average(bucket, Communicator(dist.group.WORLD)).sent
    return float((sent.view(12, 9).T @ (flat - sent).view(12, 9)).abs().max() / flat.norm() ** 2)


def test_powersgd_owes_what_is_orthogonal_to_what_it_sent() -> None:
    assert run_ranks(_orthogonal, 1)[0] < 1e-15


def test_the_part_that_topk_sends_falls_to_its_ratio() -> None:
    compressor = built("topk", ratio=0.01, warmup_steps=4)
    counts = [compressor.count(10_000, step) for step in range(6)]  # type: ignore[attr-defined]
    assert counts[0] == 10_000
    assert counts[4:] == [100, 100]
    assert [round(a / b, 1) for a, b in pairwise(counts[:5])] == [3.2, 3.2, 3.2, 3.2]
    assert built("topk", ratio=1e-9).count(50, 0) == 1  # type: ignore[attr-defined]


def _bytes(rank: int, world_size: int, name: str, options: dict[str, Any]) -> tuple[int, int]:
    parameter = torch.nn.Parameter(torch.zeros(30, 20))
    ticket = torch.nn.Parameter(torch.zeros(()))
    with CompressedAverage(
        built(name, **options), Communicator(dist.group.WORLD), {"w": parameter}, exact=ticket
    ) as exchange:
        parameter.grad, ticket.grad = torch.ones(30, 20), torch.tensor(0.1 + rank)
        exchange.average_gradients([parameter, ticket])
        # Another order of the sum rounds the last bit otherwise; a compressor would take more than that.
        assert float(ticket.grad) == pytest.approx(0.1 + (world_size - 1) / 2, rel=2**-22)
        return exchange.communicator.statistics.bytes_sent, exchange.bytes_dense


@pytest.mark.parametrize(
    ("name", "options", "payload"),
    [
        ("fp16", {}, {2: 601 * 2 + 4, 3: 2 * 4 + 2 * 2 * 601 * 2 // 3}),
        ("int8", {"block_size": 100}, {2: 601 + 7 * 4, 3: 2 * (601 + 7 * 4)}),
        ("topk", {"ratio": 0.1}, {2: 61 * 8, 3: 2 * 61 * 8}),
        ("powersgd", {"rank": 2}, {2: (1 + 60 + 40) * 4, 3: 2 * 2 * 61 * 4 // 3 + 2 * 2 * 40 * 4 // 3}),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bytes_counted_are_those_of_the_payload(
    name: str, options: dict[str, Any], payload: dict[int, int], world_size: int
) -> None:
    ticket = 2 * 4 * (world_size - 1) // world_size
    dense = 2 * 601 * 4 * (world_size - 1) // world_size
    assert run_ranks(_bytes, world_size, name, options) == [(payload[world_size] + ticket, dense)] * world_size


def _skipped(rank: int, world_size: int, name: str) -> bool:
    parameter = torch.nn.Parameter(torch.zeros(12, 9))
    with CompressedAverage(built(name), Communicator(dist.group.WORLD), {"w": parameter}) as exchange:

        def averaged(step: int) -> torch.Tensor:
            parameter.grad = gradient(rank, step, torch.float32)[:108].view(12, 9)
            exchange.average_gradients([parameter])
            return parameter.grad.clone()

        averaged(0)
        exchange.settle(True)
        skipped = averaged(1)
        exchange.settle(False)
        again = averaged(1)
        exchange.settle(True)
        return torch.equal(skipped, again) and not torch.equal(averaged(1), again)


@pytest.mark.parametrize("name", LOSSY)
def test_a_skipped_step_leaves_no_trace(name: str) -> None:
    assert run_ranks(_skipped, 2, name) == [True, True]


def _sixteen_bit(rank: int, world_size: int, name: str) -> tuple[float, float]:
    parameter = torch.nn.Parameter(torch.zeros(12, 9, dtype=torch.bfloat16))
    total, true = torch.zeros(12, 9), torch.zeros(12, 9)
    with CompressedAverage(built(name), Communicator(dist.group.WORLD), {"w": parameter}) as exchange:
        for step in range(30):
            both = [gradient(r, step, torch.bfloat16)[:108].view(12, 9) for r in range(world_size)]
            parameter.grad = both[rank].clone()
            exchange.average_gradients([parameter])
            exchange.settle(True)
            total += parameter.grad.float()
            true += torch.stack(both).float().mean(0)
        owed = exchange.memory.get("owed", "w")
        assert owed is not None and owed.dtype == torch.float32
    return float((total - true).norm()), float(true.norm())


@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_debts_of_sixteen_bit_gradients_are_kept_in_thirty_two(name: str) -> None:
    off, size = run_ranks(_sixteen_bit, 2, name)[0]
    assert off < 0.02 * size
