"""Schedules executed on real ranks: right results, same bits everywhere, the traffic that the schedule says."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.comm import execute, plans, schedules
from drivetrain.comm.arguments import OPS
from drivetrain.comm.check import ScheduleError
from drivetrain.comm.communicator import CommunicationError, Communicator
from drivetrain.comm.execute import Executor, another_group, run
from drivetrain.comm.program import compile_program, exchanges
from drivetrain.comm.schedule import Schedule, Transfer
from drivetrain.comm.schedules import chain, halving_doubling, hierarchical, recursive_doubling, ring, tree

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SEGMENT = 2048  # bytes: several messages a chunk at the longest of the sizes below


def uneven() -> Schedule:
    """Three hosts of two, three and one ranks."""
    return hierarchical(6, hosts=[2, 3, 1])


def both_ways(world_size: int) -> Schedule:
    """Two ports: every rank sends everything to both neighbours of a ring of three, in one round."""
    transfers = [Transfer(r, (r + way) % 3, 0, "add") for r in range(3) for way in (1, 2)] if world_size == 3 else []
    return Schedule.of_transfers("both_ways", world_size, 1, [transfers], ["exchange"], ports=2)


def topologies(world_size: int) -> list[Schedule]:
    """Every registered all-reduce, and the others and variants that have one."""
    made = [schedules.make(name, world_size) for name in schedules.names()]
    made += [
        ring(world_size, segments=3),
        chain(world_size, "all_reduce", segments=5),
        tree(world_size, root=-1 % world_size),
    ]
    if world_size == 6:
        made += [uneven(), hierarchical(6, levels=[3, 2])]
    if world_size == 3:
        made.append(both_ways(3))
    return made


def contribution(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size)
    if dtype in INTEGERS:
        info = torch.iinfo(dtype)
        # Over the whole range: sums and products wrap around alike on every rank.
        return torch.randint(info.min // 2, info.max // 2, (size,), generator=generator, dtype=dtype)
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    values[::5] = -0.0 if rank % 2 else 0.0  # which zero a minimum gives depends on the order
    return values.to(dtype)


def check_result(result: torch.Tensor, parts: list[torch.Tensor], op: str) -> None:
    dtype = result.dtype
    fold = {"sum": torch.add, "average": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
    if dtype in INTEGERS or op in ("min", "max"):
        expected = parts[0]
        for part in parts[1:]:
            expected = fold[op](expected, part)
        assert torch.equal(result, expected), (dtype, op)
        return
    expected, size = parts[0].double(), parts[0].double().abs()
    for part in parts[1:]:
        expected = fold[op](expected, part.double())
        size = fold[op](size, part.double().abs())
    if op == "average":
        expected, size = expected / len(parts), size / len(parts)
    bound = (len(parts) + 1) * torch.finfo(dtype).eps * size + torch.finfo(dtype).tiny
    assert bool(((result.double() - expected).abs() <= bound).all()), (dtype, op)


def cases(schedule: Schedule) -> Iterator[tuple[str, torch.dtype, int]]:
    """Every op with every dtype for what is registered, on three and four ranks; elsewhere every op and every dtype.
    Variants of what is registered differ only in the schedule; and what has very many rounds gets all on three ranks
    only."""
    registered = schedule.equals(schedules.make(schedule.name, schedule.world_size)) if known(schedule) else False
    registered = registered and (len(schedule.rounds) < 30 or schedule.world_size == 3)
    few = (torch.float32, torch.bfloat16, torch.int64)
    for op in OPS if registered else ("sum", "min"):
        every = FLOATS + INTEGERS if op == "sum" or schedule.world_size in (3, 4) else few
        for dtype in every if registered else (torch.float32,):
            if op != "average" or dtype in FLOATS:
                yield op, dtype, 1003 if op == "sum" else 33
    yield from (("sum", torch.float32, size) for size in (0, 1, 7))


def known(schedule: Schedule) -> bool:
    return schedule.name in schedules.names()


def reduce_all(comm: Communicator) -> list[tuple[str, str]]:
    """For each topology and case the digest of what this rank ends with; the last rank judges whether it is right."""
    digests = []
    for schedule in topologies(comm.world_size):
        executors = {op: Executor(schedule, comm, op=op, segment_bytes=SEGMENT) for op in OPS}
        for op, dtype, size in cases(schedule):
            if comm.device.type == "cuda" and dtype == torch.int16:
                continue  # no sum of NCCL's
            tensor = contribution(comm.rank, size, dtype).to(comm.device)
            assert executors[op](tensor) is tensor
            result = tensor.cpu()
            if comm.rank == comm.world_size - 1:
                parts = [contribution(rank, size, dtype) for rank in range(comm.world_size)]
                check_result(result, parts, op)
            bits = hashlib.sha256(result.view(torch.uint8).numpy().tobytes()).hexdigest()
            # Three ranks that all add in an order of their own round differently.
            digests.append((f"{schedule.name} {op} {dtype} {size}", bits if schedule.name != "both_ways" else ""))
        check_traffic(comm, schedule)
    return digests


def check_traffic(comm: Communicator, schedule: Schedule) -> None:
    """Twice, the second time with what was prepared the first; the counters say what the schedule says."""
    numel = 4 * schedule.chunks
    executor = Executor(schedule, comm)
    comm.statistics.reset()
    for _ in range(2):
        executor(torch.ones(numel, device=comm.device))
    counted = comm.statistics.operations[schedule.name]
    sent = [part.sends for part in schedule.of_rank(comm.rank)]
    assert counted.bytes_sent == 2 * sum(int(messages.count.sum()) for messages in sent) * 4 * 4
    assert counted.messages == 2 * sum(len(each.sends) for each in exchanges(schedule, numel, comm.rank))


@pytest.mark.parametrize(("memory", "world_size"), [("1", n) for n in range(1, 7)] + [("0", n) for n in range(2, 7)])
def test_every_topology_op_and_dtype(memory: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through memory that the ranks share, and over connections."""
    monkeypatch.setenv("DRIVETRAIN_SHARED_MEMORY", memory)
    results = ranks.run(reduce_all, world_size)
    for result in results[1:]:
        assert result == results[0]


def swap(comm: Communicator) -> list[float]:
    """What both send and replace in one round; long, so that no transport takes it before it is awaited."""
    transfers = [[Transfer(0, 1, 0, "copy"), Transfer(1, 0, 0, "copy")]]
    swapping = Executor(Schedule.of_transfers("swap", 2, 1, transfers, ["swap"]), comm)
    return swapping(torch.full((3_000_000,), float(comm.rank))).unique().tolist()


@pytest.mark.parametrize("memory", ["1", "0"])
def test_ranks_swap_what_they_have(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_SHARED_MEMORY", memory)
    assert ranks.run(swap, 2) == [[1.0], [0.0]]


def halving() -> Schedule:
    """Recursive halving, then doubling, transfer by transfer: several adjacent chunks in one message."""
    first = tuple(Transfer(r, r ^ 2, c, "add") for r in range(4) for c in range(4) if (c ^ r) & 2)
    second = tuple(Transfer(r, r ^ 1, r ^ 1, "add") for r in range(4))
    third = tuple(Transfer(r, r ^ 1, r, "copy") for r in range(4))
    fourth = tuple(Transfer(r, r ^ 2, c, "copy") for r in range(4) for c in range(4) if not (c ^ r) & 2)
    phases = ("reduce_scatter",) * 2 + ("all_gather",) * 2
    return Schedule.of_transfers("halving", 4, 4, (first, second, third, fourth), phases)


def other_kinds(comm: Communicator) -> None:
    """Not only all-reduces: what the table of Schedule promises for each kind, over the whole tensor in place."""
    n, rank = comm.world_size, comm.rank
    parts = [contribution(r, 60, torch.float64) for r in range(n)]
    total = torch.stack(parts).sum(0)
    share = slice(rank * 60 // n, (rank + 1) * 60 // n)
    for topology in (ring, halving_doubling):
        scattered = run(topology(n, kind="reduce_scatter"), parts[rank].clone(), comm)
        assert torch.allclose(scattered[share], total[share], rtol=1e-14, atol=1e-14)
        whole = torch.full_like(total, -1.0)
        whole[share] = total[share]
        assert torch.equal(run(topology(n, kind="all_gather"), whole, comm), total)
    for topology in (tree, chain):
        assert torch.equal(run(topology(n, kind="broadcast", root=n - 1), parts[rank].clone(), comm), parts[n - 1])
        reduced = run(topology(n, kind="reduce", root=1), parts[rank].clone(), comm)
        assert rank != 1 or torch.allclose(reduced, total, rtol=1e-14, atol=1e-14)


def device_plans(comm: Communicator) -> None:
    """What runs on GPUs is made of calls that Gloo has too, so its logic is tested here on the CPU."""
    n, group = comm.world_size, comm.group
    assert group is not None
    grids = {2: [[2]], 3: [[3]], 4: [[4], [2, 2]], 5: [[5]], 6: [[3, 2]]}[n]
    meetings = [Executor(hierarchical(n, levels=levels), comm)._meet(levels) for levels in grids]
    meetings.append(([group], [comm.rank]))
    second = another_group(comm, "gathering", 0)
    for size in (1, n - 1, 4 * n, 1001):
        parts = [contribution(rank, size, torch.float64) for rank in range(n)]
        made = [("native", plans.native_plan(*met, group, parts[0], "sum")) for met in meetings]
        for count in (1, 2, 3, 7, 2000):
            overlapped = plans.overlapped_plan(group, second, parts[0], "sum", count)
            made.append((f"ring in {count} parts", overlapped))
        for schedule in topologies(n) + ([halving()] if n == 4 else []):
            made.append((schedule.name, plans.batched_plan(schedule, comm.rank, group, parts[0], "sum")))
        for name, plan in made:
            for _ in range(2):
                tensor = parts[comm.rank].clone()
                plan(tensor)
                assert torch.allclose(tensor, torch.stack(parts).sum(0), rtol=1e-14, atol=1e-14), (name, size)
                if name.startswith("ring in"):
                    same = comm.all_gather(tensor)
                    assert all(torch.equal(each, same[0]) for each in same), (name, size)
    overlapped_operations(comm)
    assert another_group(comm, "gathering", 0) is second is not another_group(comm, "ring", 64)
    other_kinds(comm)


def overlapped_operations(comm: Communicator) -> None:
    """A ring in segments with every op and dtype of a device, the same bits as in one piece where the order is one."""
    assert comm.group is not None
    executor = Executor(ring(comm.world_size, 4), comm)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64):
        for op in plans.COMBINE:
            parts = [contribution(rank, 999, dtype) for rank in range(comm.world_size)]
            tensor = parts[comm.rank].clone()
            executor._device_plan(comm.group, tensor, op)(tensor)
            check_result(tensor, parts, op)
            same = comm.all_gather(tensor)
            assert all(torch.equal(each, same[0]) for each in same), (dtype, op)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6])
def test_plans_for_devices_and_other_kinds(world_size: int) -> None:
    ranks.run(device_plans, world_size)


def test_what_a_transport_runs_by_itself() -> None:
    assert plans.native_levels(ring(5)) == [5]
    assert plans.native_levels(hierarchical(6, hosts=[2, 2, 2])) == [2, 3]
    assert plans.native_levels(hierarchical(8, levels=[2, 1, 4])) == [2, 1, 4]
    for schedule in (ring(4, segments=2), ring(4, kind="all_gather"), tree(4), uneven(), hierarchical(5, [2, 3])):
        assert plans.native_levels(schedule) is None


def test_in_how_many_parts_a_ring_runs() -> None:
    assert [plans.ring_parts(ring(4, segments)) for segments in (1, 2, 5)] == [1, 2, 5]
    for schedule in (ring(4, kind="all_gather"), tree(4), hierarchical(4), Schedule("ring", 2, 1, ())):
        assert plans.ring_parts(schedule) is None
    assert plans.aligned_cuts(1000, 3, 32) == [0, 320, 640, 1000]
    assert plans.aligned_cuts(3, 5, 1) == [0, 1, 2, 3] and plans.aligned_cuts(3, 5, 4) == [0, 3]
    assert plans.aligned_cuts(0, 2, 1) == [0]


def test_refuses_what_it_cannot_run() -> None:
    comm = Communicator()
    with pytest.raises(CommunicationError, match="is for 2 ranks"):
        run(ring(2), torch.ones(3), comm)
    with pytest.raises(CommunicationError, match="flat contiguous"):
        run(ring(1), torch.ones(2, 2), comm)
    with pytest.raises(CommunicationError, match="flat contiguous"):
        run(ring(1), torch.ones(4)[::2], comm)
    with pytest.raises(CommunicationError, match="knows no op 'median'"):
        run(ring(1), torch.ones(4), comm, "median")
    with pytest.raises(CommunicationError, match="is not exact"):
        run(ring(1), torch.ones(4, dtype=torch.int64), comm, "average")


def resident() -> float:
    """MiB of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def of_every_length(comm: Communicator) -> float:
    """MiB that it costs to sum tensors of ever other lengths; no more of these are prepared for than are kept."""
    executor = Executor(ring(2), comm)
    executor(torch.ones(1_000_000))
    before = resident()
    for length in range(1_000_000, 1_000_080):
        assert executor(torch.ones(length)).sum().item() == 2 * length
    after = resident()
    for length in (*range(20, 0, -1), 1_000_000, *range(10)):
        assert executor(torch.ones(length)).sum().item() == 2 * length
    assert len(executor._plans) <= execute.KEPT
    return after - before


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux says how much memory a process has")
@pytest.mark.parametrize("memory", ["0", "1"])
def test_lengths_without_end_cost_no_more_than_the_longest(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_SHARED_MEMORY", memory)
    monkeypatch.setattr(execute, "KEPT", 90)
    assert max(ranks.run(of_every_length, 2)) < 30


def wrong_schedules(comm: Communicator) -> list[str]:
    """What each rank says to schedules that would leave it a wrong sum; nothing is sent, so the next one is right."""
    twice = [[Transfer(0, 1, 0, "add")], [Transfer(0, 1, 0, "add")], [Transfer(1, 0, 0, "copy")]]
    never = [[Transfer(0, 1, 0, "add")], [Transfer(1, 0, 1, "copy")]]
    said = []
    for rounds, chunks in ((twice, 1), (never, 2)):
        schedule = Schedule.of_transfers("mine", 2, chunks, rounds, "abc"[: len(rounds)])
        with pytest.raises(ScheduleError) as caught:
            comm.all_reduce(torch.ones(5), algorithm=schedule)
        said.append(str(caught.value))
    assert comm.all_reduce(torch.ones(5), algorithm=ring(2)).tolist() == [2.0] * 5
    return said


def test_a_schedule_is_proved_before_it_runs() -> None:
    first, second = ranks.run(wrong_schedules, 2)
    assert first == second
    assert "adding counts the contribution of rank 0 twice" in first[0] and "missing at the end" in first[1]


def small_schedules() -> st.SearchStrategy[Schedule]:
    sizes = st.integers(2, 7)
    made = [st.builds(topology, sizes) for topology in (ring, tree, recursive_doubling, halving_doubling, hierarchical)]
    made.append(st.builds(ring, st.integers(2, 4), st.integers(1, 3)))
    made.append(st.builds(chain, sizes, st.just("all_reduce"), st.just(0), st.integers(1, 4)))
    return st.one_of(*made, st.sampled_from([halving(), uneven(), both_ways(3)]))


@st.composite
def any_rounds(draw: st.DrawFn) -> Schedule:
    """Rounds that can be run, whatever they may be good for: every rank sends any chunks to any others, to be added or
    copied; a chunk arrives at a rank at most once a round."""
    size, chunks = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    messages = st.tuples(*[st.integers(0, size - 1)] * 2, st.integers(0, chunks - 1), st.sampled_from(["add", "copy"]))
    arrives_once = st.lists(messages.filter(lambda m: m[0] != m[1]), unique_by=lambda m: m[1:3], max_size=12)
    rounds = [[Transfer(*message) for message in each] for each in draw(st.lists(arrives_once, max_size=4))]
    return Schedule.of_transfers("any", size, chunks, rounds, ["any"] * len(rounds), ports=size)


def played(schedule: Schedule, tensors: list[list[int]]) -> list[list[int]]:
    """What ``schedule`` says that the ranks end with: what is sent in a round is the value before the round."""
    numel, after = len(tensors[0]), [list(tensor) for tensor in tensors]
    for each in schedule.rounds:
        before, sent = [list(tensor) for tensor in after], each.messages()
        columns = (sent.source, sent.destination, sent.chunk, sent.count, sent.add)
        for source, destination, chunk, count, add in zip(*(column.tolist() for column in columns), strict=True):
            for i in range(numel * chunk // schedule.chunks, numel * (chunk + count) // schedule.chunks):
                after[destination][i] = before[source][i] + (after[destination][i] if add else 0)
    return after


@settings(max_examples=300)
@given(
    schedule=st.one_of(small_schedules(), any_rounds()),
    numel=st.integers(0, 40),
    segment=st.integers(1, 12),
    data=st.data(),
)
def test_programs_do_what_the_schedule_says_in_any_interleaving(
    schedule: Schedule, numel: int, segment: int, data: st.DataObject
) -> None:
    """Programs played on one machine in an arbitrary order, on unbuffered channels, neither stop nor err."""
    size = schedule.world_size
    programs = [compile_program(schedule, numel, rank, segment) for rank in range(size)]
    tensors = [[(rank + 1) * 10**3 + i for i in range(numel)] for rank in range(size)]
    expected = played(schedule, tensors)
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
        elif action == "copy":
            tensors[rank][start:stop] = scratch[rank][offset : offset + stop - start]
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
    assert tensors == expected
    if schedule.name != "any":
        assert tensors == [[sum((rank + 1) * 10**3 + i for rank in range(size)) for i in range(numel)]] * size
