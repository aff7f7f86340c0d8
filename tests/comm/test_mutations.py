"""A mutated schedule is refused exactly where the mutation does harm, as a slow and plain model of it judges."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from drivetrain.comm.check import ScheduleError, check
from drivetrain.comm.schedule import Messages, Round, Schedule, Transfer
from drivetrain.comm.simulate import ProtocolError, simulate
from drivetrain.comm.verify import algorithms

MAKERS = [algorithm.make for algorithm in algorithms().values()]
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
Rounds = list[list[Transfer]]


def harmless(schedule: Schedule, rounds: Rounds) -> bool:
    """Whether ``rounds`` can run and do what the kind of ``schedule`` says: every value is a bag of contributions."""
    n, chunks, kind, root = schedule.world_size, schedule.chunks, schedule.kind, schedule.root
    held = {(r, c): Counter({(r, c): 1}) for r in range(n) for c in range(chunks)}
    for transfers in rounds:
        peers = Counter(source for source, _ in {(t.source, t.destination) for t in transfers})
        givers = Counter(destination for _, destination in {(t.source, t.destination) for t in transfers})
        arrivals = Counter((t.destination, t.chunk) for t in transfers)
        if max([*peers.values(), *givers.values(), *arrivals.values()], default=0) > 1:
            return False
        for t in transfers:
            if t.source == t.destination or not (0 <= t.chunk < chunks and {t.source, t.destination} <= set(range(n))):
                return False
        sent = [(t, held[t.source, t.chunk]) for t in transfers]
        for t, value in sent:
            place = t.destination, t.chunk
            held[place] = held[place] + value if t.op == "add" else value
    for (r, c), value in held.items():
        owner = c * n // chunks
        if (kind in ("reduce", "gather") and r != root) or (kind in ("reduce_scatter", "scatter") and r != owner):
            continue
        origin = owner if kind in ("all_gather", "gather") else root
        if value != (Counter({(s, c): 1 for s in range(n)}) if kind in REDUCING else Counter({(origin, c): 1})):
            return False
    return True


@st.composite
def mutated(draw: st.DrawFn) -> tuple[Schedule, Rounds]:
    schedule = draw(st.sampled_from(MAKERS))(draw(st.integers(2, 9)))
    rounds = [list(each.transfers()) for each in schedule.rounds]
    number = draw(st.sampled_from([i for i, each in enumerate(rounds) if each]))
    transfers = rounds[number]
    index = draw(st.integers(0, len(transfers) - 1))
    chosen = transfers[index]
    rank, chunk = st.integers(-1, schedule.world_size), st.integers(-1, schedule.chunks)
    match draw(
        st.sampled_from(["drop", "duplicate", "later", "swap", "rounds", "chunk", "op", "source", "destination"])
    ):
        case "drop":
            del transfers[index]
        case "duplicate":
            transfers.append(chosen)
        case "later":
            rounds[draw(st.integers(0, len(rounds) - 1))].append(chosen)
        case "swap":
            other = draw(st.integers(0, len(transfers) - 1))
            transfers[index] = chosen._replace(chunk=transfers[other].chunk)
            transfers[other] = transfers[other]._replace(chunk=chosen.chunk)
        case "rounds":
            other = draw(st.integers(0, len(rounds) - 1))
            rounds[number], rounds[other] = rounds[other], rounds[number]
        case "chunk":
            transfers[index] = chosen._replace(chunk=draw(chunk))
        case "op":
            transfers[index] = chosen._replace(op="copy" if chosen.op == "add" else "add")
        case "source":
            transfers[index] = chosen._replace(source=draw(rank))
        case "destination":
            transfers[index] = chosen._replace(destination=draw(rank))
    return schedule, rounds


def rebuilt(schedule: Schedule, rounds: Rounds) -> Schedule:
    return Schedule.of_transfers(
        schedule.name,
        schedule.world_size,
        schedule.chunks,
        rounds,
        schedule.phases,
        schedule.kind,
        schedule.root,
    )


@settings(max_examples=600)
@given(mutated())
def test_a_mutation_is_refused_exactly_where_it_does_harm(mutation: tuple[Schedule, Rounds]) -> None:
    schedule, rounds = mutation
    if harmless(schedule, rounds):
        check(rebuilt(schedule, rounds))
        return
    with pytest.raises(ScheduleError) as caught:
        check(rebuilt(schedule, rounds))
    assert caught.value.rank is not None and caught.value.chunk is not None


def test_the_model_accepts_what_is_right() -> None:
    for make in MAKERS:
        schedule = make(6)
        assert harmless(schedule, [list(each.transfers()) for each in schedule.rounds])


@settings(max_examples=60)
@given(mutated(), st.booleans())
def test_a_side_that_differs_from_the_other_is_refused(mutation: tuple[Schedule, Rounds], senders: bool) -> None:
    """Only senders, or only receivers, follow the mutated rounds: the check says so, and so does playing it."""
    made, rounds = mutation
    # Chunk by chunk like the mutated one: several chunks in one message are another message than one each.
    right = rebuilt(made, [list(each.transfers()) for each in made.rounds])
    other = rebuilt(made, rounds)
    same = [sorted(a.transfers()) == sorted(b.transfers()) for a, b in zip(right.rounds, other.rounds, strict=True)]
    assume(not all(same))
    mixed = replace(
        right, rounds=tuple(map(_mixed, *((other.rounds, right.rounds) if senders else (right.rounds, other.rounds))))
    )
    with pytest.raises(ScheduleError) as caught:
        check(mixed)
    assert caught.value.round == same.index(False)
    inputs = [[1] * 20] * right.world_size
    with pytest.raises(ProtocolError):
        simulate(mixed, inputs)


def _mixed(sending: Round, receiving: Round) -> Round:
    return Round(sending.phase, sending.step, sending.world_size, sending.sends, receiving.receives)


def test_the_two_sides_are_named() -> None:
    make = algorithms()["ring"].make
    right = make(4)
    late = Messages.of_transfers([*right.rounds[2].transfers()[:3], Transfer(3, 0, 0, "add")])
    wrong = Round(right.rounds[2].phase, 2, 4, Round.listed("", 0, 4, late).sends, right.rounds[2].receives)
    rounds = (*right.rounds[:2], wrong, *right.rounds[3:])
    with pytest.raises(
        ScheduleError, match=r"round 2, rank 0, chunk 0: rank 3 sends chunk 0 .* the rank expects chunk 1"
    ):
        check(replace(right, rounds=rounds))
