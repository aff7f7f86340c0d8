"""The checker accepts the ring at every size and refuses every way of breaking it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.comm.check import ScheduleError, check
from drivetrain.comm.schedule import Schedule, Transfer, ring, topology
from drivetrain.errors import ConfigurationError


@pytest.mark.parametrize("world_size", range(1, 65))
def test_ring_is_an_all_reduce_of_least_traffic(world_size: int) -> None:
    schedule = ring(world_size)
    check(schedule)
    assert len(schedule.rounds) == len(schedule.phases) == 2 * (world_size - 1)
    assert schedule.chunks == world_size
    for rank in range(world_size):
        sent = sum(transfer.source == rank for transfers in schedule.rounds for transfer in transfers)
        assert sent == 2 * (world_size - 1)


def test_recursive_doubling_and_a_halving_exchange_are_schedules_too() -> None:
    doubling = tuple(tuple(Transfer(r, r ^ bit, 0, "add") for r in range(8)) for bit in (1, 2, 4))
    check(Schedule("doubling", 8, 1, doubling, ("reduce_scatter",) * 3))
    # Two chunks between the same two ranks are one message.
    exchange = (tuple(Transfer(r, 1 - r, chunk, "add") for r in range(2) for chunk in range(2)),)
    check(Schedule("exchange", 2, 2, exchange, ("reduce_scatter",)))


@st.composite
def places(draw: st.DrawFn) -> tuple[Schedule, int, int]:
    schedule = ring(draw(st.integers(2, 9)))
    number = draw(st.integers(0, len(schedule.rounds) - 1))
    return schedule, number, draw(st.integers(0, len(schedule.rounds[number]) - 1))


def with_transfer(schedule: Schedule, number: int, index: int, *new: Transfer) -> Schedule:
    transfers = list(schedule.rounds[number])
    transfers[index : index + 1] = new
    return with_round(schedule, number, tuple(transfers))


def with_round(schedule: Schedule, number: int, transfers: tuple[Transfer, ...]) -> Schedule:
    return replace(schedule, rounds=(*schedule.rounds[:number], transfers, *schedule.rounds[number + 1 :]))


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
    transfer = schedule.rounds[number][index]
    with pytest.raises(ScheduleError, match="twice in one round") as caught:
        check(with_transfer(schedule, number, index, transfer, transfer))
    assert (caught.value.round, caught.value.rank) == (number, transfer.destination)
    assert caught.value.chunk == transfer.chunk


@settings(max_examples=100, deadline=None)
@given(places(), st.data())
def test_wrong_chunk(place: tuple[Schedule, int, int], data: st.DataObject) -> None:
    schedule, number, index = place
    transfer = schedule.rounds[number][index]
    chunk = data.draw(st.integers(-1, schedule.chunks).filter(lambda c: c != transfer.chunk))
    with pytest.raises(ScheduleError):
        check(with_transfer(schedule, number, index, transfer._replace(chunk=chunk)))


@settings(max_examples=100, deadline=None)
@given(places(), st.data())
def test_wrong_peer(place: tuple[Schedule, int, int], data: st.DataObject) -> None:
    schedule, number, index = place
    transfer = schedule.rounds[number][index]
    field = data.draw(st.sampled_from(["source", "destination"]))
    peer = data.draw(st.integers(-1, schedule.world_size).filter(lambda r: r != getattr(transfer, field)))
    with pytest.raises(ScheduleError):
        check(with_transfer(schedule, number, index, transfer._replace(**{field: peer})))


@settings(max_examples=60, deadline=None)
@given(places())
def test_wrong_operation(place: tuple[Schedule, int, int]) -> None:
    schedule, number, index = place
    transfer = schedule.rounds[number][index]
    other = "copy" if transfer.op == "add" else "add"
    with pytest.raises(ScheduleError):
        check(with_transfer(schedule, number, index, transfer._replace(op=other)))


@settings(max_examples=60, deadline=None)
@given(places(), st.data())
def test_swapped_chunks_of_two_transfers(place: tuple[Schedule, int, int], data: st.DataObject) -> None:
    schedule, number, index = place
    transfers = list(schedule.rounds[number])
    other = data.draw(st.integers(0, len(transfers) - 1).filter(lambda i: i != index))
    one, two = transfers[index], transfers[other]
    transfers[index], transfers[other] = one._replace(chunk=two.chunk), two._replace(chunk=one.chunk)
    with pytest.raises(ScheduleError):
        check(with_round(schedule, number, tuple(transfers)))


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 9), st.data())
def test_swapped_rounds(world_size: int, data: st.DataObject) -> None:
    schedule = ring(world_size)
    rounds = list(schedule.rounds)
    one = data.draw(st.integers(0, len(rounds) - 1))
    two = data.draw(st.integers(0, len(rounds) - 1).filter(lambda i: i != one))
    rounds[one], rounds[two] = rounds[two], rounds[one]
    with pytest.raises(ScheduleError):
        check(replace(schedule, rounds=tuple(rounds)))


def test_errors_name_round_rank_and_chunk() -> None:
    schedule = ring(3)
    broken = with_transfer(schedule, 1, 0, schedule.rounds[1][0]._replace(chunk=0))
    with pytest.raises(ScheduleError, match=r"'ring' for 3 ranks: round 1, rank 1, chunk 0: .*rank 0 twice"):
        check(broken)
    with pytest.raises(ScheduleError, match="4 rounds but 3 phase names"):
        check(replace(schedule, phases=schedule.phases[:-1]))
    with pytest.raises(ScheduleError, match="neither 'add' nor 'copy'"):
        check(with_transfer(schedule, 0, 0, schedule.rounds[0][0]._replace(op="max")))  # type: ignore[arg-type]


def test_topologies_are_found_by_name() -> None:
    assert topology("ring") is ring
    with pytest.raises(ConfigurationError, match="did you mean 'ring'"):
        topology("rings")
    with pytest.raises(ConfigurationError, match="at least one rank"):
        ring(0)


def test_schedule_and_check_load_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from drivetrain.comm.check import check; from drivetrain.comm.schedule import ring;"
        "check(ring(3)); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
