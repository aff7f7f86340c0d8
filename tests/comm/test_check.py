"""The checker accepts the ring at every size and refuses every way of breaking it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.comm.check import ScheduleError, check
from drivetrain.comm.schedule import Kind, Schedule, Transfer
from drivetrain.comm.schedules import topology
from drivetrain.comm.topologies.ring import ring
from drivetrain.errors import ConfigurationError


@pytest.mark.parametrize("world_size", [*range(1, 17), 64])
def test_ring_is_an_all_reduce_of_least_traffic(world_size: int) -> None:
    schedule = ring(world_size)
    check(schedule)
    assert len(schedule.rounds) == len(schedule.phases) == 2 * (world_size - 1)
    assert schedule.chunks == world_size
    for rank in range(world_size):
        sent = sum(transfer.source == rank for each in schedule.rounds for transfer in each.transfers())
        assert sent == 2 * (world_size - 1)


def test_recursive_doubling_and_a_halving_exchange_are_schedules_too() -> None:
    doubling = tuple(tuple(Transfer(r, r ^ bit, 0, "add") for r in range(8)) for bit in (1, 2, 4))
    check(Schedule.of_transfers("doubling", 8, 1, doubling, ("reduce_scatter",) * 3))
    # Two chunks between the same two ranks are one message.
    exchange = (tuple(Transfer(r, 1 - r, chunk, "add") for r in range(2) for chunk in range(2)),)
    check(Schedule.of_transfers("exchange", 2, 2, exchange, ("reduce_scatter",)))


@st.composite
def places(draw: st.DrawFn) -> tuple[Schedule, int, int]:
    schedule = ring(draw(st.integers(2, 9)))
    number = draw(st.integers(0, len(schedule.rounds) - 1))
    return schedule, number, draw(st.integers(0, len(schedule.rounds[number].transfers()) - 1))


def with_transfer(schedule: Schedule, number: int, index: int, *new: Transfer) -> Schedule:
    transfers = list(schedule.rounds[number].transfers())
    transfers[index : index + 1] = new
    return with_round(schedule, number, tuple(transfers))


def with_round(schedule: Schedule, number: int, transfers: tuple[Transfer, ...]) -> Schedule:
    rounds = [transfers if i == number else each.transfers() for i, each in enumerate(schedule.rounds)]
    return Schedule.of_transfers(schedule.name, schedule.world_size, schedule.chunks, rounds, schedule.phases)


@settings(max_examples=60, deadline=None)
@given(places())
def test_dropped_transfer(place: tuple[Schedule, int, int]) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(with_transfer(*place))
    assert caught.value.rank is not None and caught.value.chunk is not None


@settings(max_examples=60, deadline=None)
@given(places())
def test_duplicated_transfer_is_named(place: tuple[Schedule, int, int]) -> None:
    schedule, number, index = place
    transfer = schedule.rounds[number].transfers()[index]
    with pytest.raises(ScheduleError, match="twice in one round") as caught:
        check(with_transfer(schedule, number, index, transfer, transfer))
    assert (caught.value.round, caught.value.rank) == (number, transfer.destination)
    assert caught.value.chunk == transfer.chunk


@settings(max_examples=100, deadline=None)
@given(places(), st.data())
def test_wrong_chunk(place: tuple[Schedule, int, int], data: st.DataObject) -> None:
    schedule, number, index = place
    transfer = schedule.rounds[number].transfers()[index]
    chunk = data.draw(st.integers(-1, schedule.chunks).filter(lambda c: c != transfer.chunk))
    with pytest.raises(ScheduleError):
        check(with_transfer(schedule, number, index, transfer._replace(chunk=chunk)))


@settings(max_examples=100, deadline=None)
@given(places(), st.data())
def test_wrong_peer(place: tuple[Schedule, int, int], data: st.DataObject) -> None:
    schedule, number, index = place
    transfer = schedule.rounds[number].transfers()[index]
    field = data.draw(st.sampled_from(["source", "destination"]))
    peer = data.draw(st.integers(-1, schedule.world_size).filter(lambda r: r != getattr(transfer, field)))
    with pytest.raises(ScheduleError):
        check(with_transfer(schedule, number, index, transfer._replace(**{field: peer})))


@settings(max_examples=60, deadline=None)
@given(places())
def test_wrong_operation(place: tuple[Schedule, int, int]) -> None:
    schedule, number, index = place
    transfer = schedule.rounds[number].transfers()[index]
    other = "copy" if transfer.op == "add" else "add"
    with pytest.raises(ScheduleError):
        check(with_transfer(schedule, number, index, transfer._replace(op=other)))


@settings(max_examples=60, deadline=None)
@given(places(), st.data())
def test_swapped_chunks_of_two_transfers(place: tuple[Schedule, int, int], data: st.DataObject) -> None:
    schedule, number, index = place
    transfers = list(schedule.rounds[number].transfers())
    other = data.draw(st.integers(0, len(transfers) - 1).filter(lambda i: i != index))
    one, two = transfers[index], transfers[other]
    transfers[index], transfers[other] = one._replace(chunk=two.chunk), two._replace(chunk=one.chunk)
    with pytest.raises(ScheduleError):
        check(with_round(schedule, number, tuple(transfers)))


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 9), st.data())
def test_swapped_rounds(world_size: int, data: st.DataObject) -> None:
    schedule = ring(world_size)
    rounds = [each.transfers() for each in schedule.rounds]
    one = data.draw(st.integers(0, len(rounds) - 1))
    two = data.draw(st.integers(0, len(rounds) - 1).filter(lambda i: i != one))
    rounds[one], rounds[two] = rounds[two], rounds[one]
    with pytest.raises(ScheduleError):
        check(Schedule.of_transfers("swapped", world_size, schedule.chunks, rounds, schedule.phases))


def test_errors_name_round_rank_and_chunk() -> None:
    schedule = ring(3)
    transfers = schedule.rounds[1].transfers()
    broken = with_transfer(schedule, 1, 0, transfers[0]._replace(chunk=0))
    with pytest.raises(ScheduleError, match=r"'ring' for 3 ranks: round 1, rank 1, chunk 0: .*rank 0 twice"):
        check(broken)
    rounds = [each.transfers() for each in schedule.rounds]
    with pytest.raises(ConfigurationError, match="4 rounds but 3 phase names"):
        Schedule.of_transfers("short", 3, 3, rounds, schedule.phases[:-1])
    with pytest.raises(ConfigurationError, match="neither 'add' nor 'copy'"):
        with_transfer(schedule, 0, 0, transfers[0]._replace(op="max"))  # type: ignore[arg-type]


def test_topologies_are_found_by_name() -> None:
    assert topology("ring") is ring
    with pytest.raises(ConfigurationError, match="did you mean 'ring'"):
        topology("rings")
    with pytest.raises(ConfigurationError, match="at least one rank"):
        ring(0)


def test_schedule_and_check_load_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None;"  # an import of it raises
        "from drivetrain.comm import check, schedules; check.check(schedules.topology('ring')(3))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("segments", [1, 3])
def test_rings_of_every_kind(kind: Kind, segments: int) -> None:
    for world_size in range(1, 10):
        check(ring(world_size, segments, kind))


def test_the_view_of_a_rank_is_its_part_of_the_whole() -> None:
    schedule = ring(5, 2)
    for rank in range(5):
        for each, part in zip(schedule.rounds, schedule.of_rank(rank), strict=True):
            whole = each.transfers()
            assert part.sends.transfers() == tuple(t for t in whole if t.source == rank)
            assert part.receives.transfers() == tuple(t for t in whole if t.destination == rank)
    assert schedule.equals(ring(5, 2)) and not schedule.equals(ring(5))
