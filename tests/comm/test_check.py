"""The checker accepts the ring at every size and refuses every way of breaking it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.comm.check import ScheduleError, check
from drivetrain.comm.schedule import Kind, Messages, Round, Schedule, Transfer
from drivetrain.comm.schedules import topology
from drivetrain.comm.topologies.doubling import recursive_doubling
from drivetrain.comm.topologies.ring import ring
from drivetrain.comm.topologies.tree import tree
from drivetrain.errors import ConfigurationError


@pytest.mark.parametrize("world_size", [*range(1, 14), 33])
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


@settings(max_examples=60)
@given(places())
def test_duplicated_transfer_is_named(place: tuple[Schedule, int, int]) -> None:
    schedule, number, index = place
    transfer = schedule.rounds[number].transfers()[index]
    with pytest.raises(ScheduleError, match="twice in one round") as caught:
        check(with_transfer(schedule, number, index, transfer, transfer))
    assert (caught.value.round, caught.value.rank) == (number, transfer.destination)
    assert caught.value.chunk == transfer.chunk


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
    with pytest.raises(ConfigurationError, match="world_size=0 of a ring is too small: pass 1 or more"):
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


def test_places_are_named_among_thousands_of_ranks() -> None:
    """The last transfer of recursive doubling's third round is lost; the fingerprints say so, exact sets say where."""
    right = recursive_doubling(4096)
    whole = right.rounds[2].messages()
    lost = Round.listed(right.rounds[2].phase, 2, 4096, whole.select(np.arange(4095)))
    broken = replace(right, rounds=(*right.rounds[:2], lost, *right.rounds[3:]))
    with pytest.raises(
        ScheduleError, match=r"chunk 0: the contribution of ranks 4092, 4093, 4094, 4095 is missing"
    ) as caught:
        check(broken)
    assert (caught.value.rank, caught.value.chunk) == (3, 0)
    large = ring(512)
    sent = large.rounds[500].messages()
    sent = replace(sent, chunk=np.where(sent.source == 77, (sent.chunk + 1) % 512, sent.chunk))
    rounds = (*large.rounds[:500], Round.listed("reduce_scatter", 500, 512, sent), *large.rounds[501:])
    with pytest.raises(ScheduleError, match="round 500, rank 78, chunk 90: adding counts the contribution of ranks"):
        check(replace(large, rounds=rounds))


def test_a_harmless_addition_is_not_refused_and_a_doubled_one_is_however_often() -> None:
    # Rank 1 adds what it has already, but is overwritten before anyone looks.
    rounds = [[Transfer(0, 1, 0, "add")], [Transfer(0, 1, 0, "add")], [Transfer(1, 0, 0, "add")]]
    with pytest.raises(ScheduleError, match="round 1, rank 1, chunk 0: adding counts the contribution of rank 0 twice"):
        check(Schedule.of_transfers("doubled", 2, 1, rounds, ("reduce",) * 3))
    rounds[2:] = [[Transfer(2, 1, 0, "copy")], [Transfer(0, 1, 0, "copy")], [Transfer(0, 2, 0, "copy")]]
    check(Schedule.of_transfers("broadcast", 3, 1, rounds, ("broadcast",) * 5, kind="broadcast"))


def test_ports() -> None:
    star = [[Transfer(r, 0, r, "copy") for r in (1, 2)]]
    check(Schedule.of_transfers("star", 3, 3, star, ["gather"], kind="gather", ports=2))
    with pytest.raises(ScheduleError, match=r"round 0, rank 0, chunk 2: the rank receives from 1 and 2 .* 1 port"):
        check(Schedule.of_transfers("star", 3, 3, star, ["gather"], kind="gather"))
    fan = [[Transfer(0, r, 0, "copy") for r in (1, 2, 3)]]
    with pytest.raises(ScheduleError, match=r"rank 0, chunk 0: the rank sends to 1 and 2 and 3 .* 2 port"):
        check(Schedule.of_transfers("fan", 4, 1, fan, ["broadcast"], kind="broadcast", ports=2))


def test_shapes_that_cannot_be() -> None:
    right = ring(4)
    for change, sentence in (
        ({"chunks": 0}, "has 0 chunks"),
        ({"ports": 0}, "0 ports"),
        ({"kind": "all_to_all"}, "there is no kind 'all_to_all'"),
        ({"kind": "reduce_scatter", "chunks": 6}, "as many chunks, but has 6"),
        ({"kind": "reduce", "root": 4}, "there is no such root"),
        ({"rounds": right.rounds[1:]}, "is step 1 of phase 'reduce_scatter', but step 0 is next"),
    ):
        with pytest.raises(ScheduleError, match=sentence):
            check(replace(right, **change))


def test_values_that_end_where_they_do_not_belong() -> None:
    right = tree(4, "broadcast")
    with pytest.raises(ScheduleError, match="the contribution of rank 0 is missing at the end"):
        check(replace(right, rounds=right.rounds[:1]))
    added = [[Transfer(0, 1, 0, "add")]]
    with pytest.raises(ScheduleError, match="the value of rank 1 does not belong there at the end"):
        check(Schedule.of_transfers("added", 2, 1, added, ["broadcast"], kind="broadcast"))


SWAP = Messages.of_transfers([Transfer(0, 1, 0, "add"), Transfer(1, 0, 0, "add")])


def of_two(*rounds: object) -> Schedule:
    return Schedule("strange", 2, 1, rounds)  # type: ignore[arg-type]


def columns(**changed: object) -> Schedule:
    return of_two(Round.listed("p", 0, 2, replace(SWAP, **changed)))  # type: ignore[arg-type]


ILL_FORMED = [
    (replace(of_two(), rounds=None), "its rounds are a NoneType"),
    (of_two(1), "it is a int, not a Round"),
    (of_two(Round("p", 0, 2, lambda ranks: SWAP, lambda ranks: None)), "a side gives a NoneType, not Messages"),  # type: ignore[arg-type,return-value]
    (of_two(Round.listed("p", 0, 3, SWAP)), "it is for 3 ranks"),
    (columns(source=[0, 1]), "'source' of its messages is list"),
    (columns(chunk=np.array([0])), "'chunk' of its messages is int64(1,): an array of int64 is needed, all equally"),
    (columns(count=np.ones(2)), "'count' of its messages is float64(2,)"),
    (columns(destination=np.array([1, 0], np.int32)), "'destination' of its messages is int32(2,)"),
    (columns(add=np.ones(2, np.int64)), "'add' of its messages is int64(2,): an array of bool"),
    (columns(chunk=np.array([2**63 - 1, 0]), count=np.array([2**63 - 1, 1])), "there is no such chunk"),
]


@pytest.mark.parametrize("number", range(len(ILL_FORMED)))
def test_what_is_no_schedule_is_one_error(number: int) -> None:
    check(columns())
    schedule, expected = ILL_FORMED[number]
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert expected in str(caught.value)


@pytest.mark.parametrize("world_size", [2, 12, 40])
def test_a_rank_that_asks_alone_gets_its_own_part(world_size: int) -> None:
    """Ranks run what they get alone: a side that always gives all messages, or leaves some out, is none."""
    whole = ring(world_size)

    def strange(each: Round, senders: bool, lost: bool) -> Round:
        side = each.sends if senders else each.receives
        every = np.arange(world_size)

        def other(ranks: np.ndarray) -> Messages:
            return side(every if len(ranks) == world_size or not lost else ranks[:0])

        return replace(each, sends=other) if senders else replace(each, receives=other)

    for senders in (True, False):
        for lost in (True, False):
            rounds = tuple(strange(each, senders, lost) for each in whole.rounds)
            with pytest.raises(ScheduleError, match="asked alone, the rank " + ("sends" if senders else "expects")):
                check(replace(whole, rounds=rounds))
