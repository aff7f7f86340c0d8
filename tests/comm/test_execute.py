"""Schedules executed on real ranks: right sums, same bits everywhere, the least traffic."""

from __future__ import annotations

import hashlib

import pytest
import ranks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.comm.check import check
from drivetrain.comm.communicator import CommunicationError, Communicator
from drivetrain.comm.execute import Executor, _batched_plan, _native_plan, run
from drivetrain.comm.program import compile_program
from drivetrain.comm.schedule import Schedule, Transfer
from drivetrain.comm.topologies.ring import ring

SIZES = (0, 1, 7, 1000003)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def contribution(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, (size,), generator=generator)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def check_sum(tensor: torch.Tensor, parts: list[torch.Tensor]) -> None:
    if tensor.dtype == torch.int64:
        assert torch.equal(tensor, sum(parts))
        return
    error = sum(part.double() for part in parts).sub_(tensor).abs_()
    bound = len(parts) * torch.finfo(tensor.dtype).eps * sum(part.double().abs() for part in parts)
    assert bool((error <= bound).all()), (tensor.dtype, tensor.numel())


def reduce_all(comm: Communicator, schedule: Schedule, segment_bytes: int) -> list[str]:
    """For each size and dtype the digest of what this rank ends with; rank 0 judges whether the sums are right."""
    executor = Executor(schedule, comm, segment_bytes=segment_bytes)
    digests = []
    for dtype in DTYPES:
        for size in SIZES:
            mine = contribution(comm.rank, size, dtype)
            tensor = mine.clone()
            assert executor(tensor) is tensor
            assert torch.equal(executor(mine), tensor)
            if comm.is_master:
                check_sum(tensor, [contribution(rank, size, dtype) for rank in range(comm.world_size)])
            digests.append(hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest())
    return digests


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_ring_sums_to_the_same_bits_on_every_rank(world_size: int) -> None:
    results = ranks.run(reduce_all, world_size, ring(world_size), 2**20)
    assert all(result == results[0] for result in results)


def doubling() -> Schedule:
    """Recursive doubling: both sides send and add the same chunk in the same round."""
    rounds = tuple(tuple(Transfer(r, r ^ bit, 0, "add") for r in range(4)) for bit in (1, 2))
    return Schedule.of_transfers("doubling", 4, 1, rounds, ("reduce_scatter",) * 2)


def halving() -> Schedule:
    """Recursive halving, then doubling: several adjacent chunks in one message."""
    first = tuple(Transfer(r, r ^ 2, c, "add") for r in range(4) for c in range(4) if (c ^ r) & 2)
    second = tuple(Transfer(r, r ^ 1, r ^ 1, "add") for r in range(4))
    third = tuple(Transfer(r, r ^ 1, r, "copy") for r in range(4))
    fourth = tuple(Transfer(r, r ^ 2, c, "copy") for r in range(4) for c in range(4) if not (c ^ r) & 2)
    phases = ("reduce_scatter",) * 2 + ("all_gather",) * 2
    return Schedule.of_transfers("halving", 4, 4, (first, second, third, fourth), phases)


@pytest.mark.parametrize("schedule", [doubling(), halving()], ids=lambda s: s.name)
def test_other_schedules_run_too(schedule: Schedule) -> None:
    check(schedule)
    results = ranks.run(reduce_all, 4, schedule, 2**18)
    assert all(result == results[0] for result in results)


def average(comm: Communicator) -> float:
    tensor = contribution(comm.rank, 10007, torch.float64)
    mean = torch.stack([contribution(r, 10007, torch.float64) for r in range(comm.world_size)]).mean(0)
    run(ring(comm.world_size), tensor.div_(comm.world_size), comm)
    return float(((tensor - mean).abs() / mean.abs().max()).max())


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_average_is_the_serial_mean(world_size: int) -> None:
    assert max(ranks.run(average, world_size)) <= 1e-14


def device_plans(comm: Communicator) -> None:
    """What runs on GPUs is made of calls that Gloo has too, so its logic is tested here on the CPU."""
    n = comm.world_size
    for size in (1, 4 * n, 1001):
        parts = [contribution(rank, size, torch.float64) for rank in range(n)]
        plans = [_native_plan(comm, parts[0]), _batched_plan(ring(n), comm, parts[0])]
        plans += [_batched_plan(schedule, comm, parts[0]) for schedule in (doubling(), halving()) if n == 4]
        for plan in plans:
            tensor = parts[comm.rank].clone()
            plan(tensor)
            assert torch.allclose(tensor, torch.stack(parts).sum(0), rtol=1e-14, atol=1e-14), (size, plan)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_plans_for_devices(world_size: int) -> None:
    ranks.run(device_plans, world_size)


def traffic(comm: Communicator) -> tuple[int, int]:
    executor = Executor(ring(comm.world_size), comm)
    executor(torch.ones(3000))
    return comm.statistics.bytes_sent, comm.statistics.messages


def test_ring_sends_the_least_a_rank_can() -> None:
    assert ranks.run(traffic, 3) == [(2 * 2 * 3000 * 4 // 3, 4)] * 3


def test_refuses_what_it_cannot_run() -> None:
    comm = Communicator()
    with pytest.raises(CommunicationError, match="is for 2 ranks"):
        run(ring(2), torch.ones(3), comm)
    with pytest.raises(CommunicationError, match="flat contiguous"):
        run(ring(1), torch.ones(2, 2), comm)
    with pytest.raises(CommunicationError, match="flat contiguous"):
        run(ring(1), torch.ones(4)[::2], comm)


@settings(max_examples=80, deadline=None)
@given(
    schedule=st.one_of(st.builds(ring, st.integers(2, 6)), st.sampled_from([doubling(), halving()])),
    numel=st.integers(0, 40),
    segment=st.integers(1, 12),
    data=st.data(),
)
def test_programs_sum_in_any_interleaving(schedule: Schedule, numel: int, segment: int, data: st.DataObject) -> None:
    """Programs played on one machine in an arbitrary order, on unbuffered channels, neither stop nor err."""
    size = schedule.world_size
    programs = [compile_program(schedule, numel, rank, segment) for rank in range(size)]
    tensors = [[(rank + 1) * 10**3 + i for i in range(numel)] for rank in range(size)]
    expected = [sum(tensor[i] for tensor in tensors) for i in range(numel)]
    scratch = [[0] * program.scratch for program in programs]
    position = [0] * size
    posted: list[dict[tuple[str, int, int], tuple[int, list[int], int, int]]] = [{} for _ in range(size)]
    done: list[set[int]] = [set() for _ in range(size)]

    def deliver(source: int, destination: int, tag: int) -> None:
        sending = posted[source].get(("send", destination, tag))
        receiving = posted[destination].get(("receive", source, tag))
        if sending and receiving:
            out_slot, out, start, stop = sending
            in_slot, into, into_start, into_stop = receiving
            assert stop - start == into_stop - into_start
            into[into_start:into_stop] = out[start:stop]
            done[source].add(out_slot)
            done[destination].add(in_slot)
            del posted[source]["send", destination, tag], posted[destination]["receive", source, tag]

    def step(rank: int) -> bool:
        action, (start, stop), slot, peer, tag, offset = programs[rank].instructions[position[rank]]
        if action.startswith("wait") and slot not in done[rank]:
            return False
        if action == "send":
            posted[rank]["send", peer, tag] = (slot, tensors[rank], start, stop)
            deliver(rank, peer, tag)
        elif action == "receive":
            place = (tensors[rank], start, stop) if offset < 0 else (scratch[rank], offset, offset + stop - start)
            posted[rank]["receive", peer, tag] = (slot, *place)
            deliver(peer, rank, tag)
        elif action == "add":
            for i in range(start, stop):
                tensors[rank][i] += scratch[rank][offset + i - start]
        position[rank] += 1
        return True

    order = data.draw(st.permutations(range(size)))
    burst = data.draw(st.integers(1, 20))
    moved = True
    while moved:
        moved = False
        for rank in order:
            for _ in range(burst):
                if position[rank] == len(programs[rank].instructions) or not step(rank):
                    break
                moved = True
    assert [len(program.instructions) for program in programs] == position
    assert tensors == [expected] * size
