"""Schedules played on plain values: right results for every kind and reduction, exact bits, no message unexamined."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from drivetrain.comm.schedule import Schedule
from drivetrain.comm.schedules import make, names
from drivetrain.comm.simulate import Packet, ProtocolError, simulate
from drivetrain.comm.topologies.chain import chain
from drivetrain.comm.topologies.halving_doubling import halving_doubling
from drivetrain.comm.topologies.hierarchical import hierarchical
from drivetrain.comm.topologies.ring import ring
from drivetrain.comm.topologies.tree import tree
from drivetrain.comm.verify import algorithms
from drivetrain.errors import ConfigurationError

EXACT = {"sum": np.sum, "average": np.mean, "product": np.prod, "min": np.min, "max": np.max}


@pytest.mark.parametrize("name", [name for name in algorithms() if "gather" not in name and "scatter" not in name])
def test_sums_where_ranks_are_asked_to(name: str) -> None:
    for world_size in (1, 2, 5, 8):
        schedule = algorithms()[name].make(world_size)
        values = [np.arange(11) * (rank + 1) for rank in range(world_size)]
        results = simulate(schedule, values)
        total = values[schedule.root] if schedule.kind == "broadcast" else np.sum(values, axis=0)
        for rank, result in enumerate(results):
            if schedule.kind == "reduce" and rank != schedule.root:
                assert result is None
            else:
                assert np.array_equal(result, total)


@pytest.mark.parametrize("op", EXACT)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.bool_, np.float32, np.float64])
def test_reductions(op: str, dtype: type) -> None:
    random = np.random.default_rng(3)
    values = [random.integers(0, 2 if dtype == np.bool_ else 120, 13).astype(dtype) for _ in range(6)]
    for name in names():
        results = simulate(make(name, 6), values, op)
        wide = values if op in ("min", "max") or np.dtype(dtype).kind == "f" else np.array(values).astype(np.int64)
        for result in results:
            assert np.allclose(result, EXACT[op](wide, axis=0), rtol=1e-6), (name, op, dtype)
            if op in ("min", "max"):
                assert result.dtype == dtype
            elif np.dtype(dtype).kind in "iub" and op in ("sum", "product"):
                assert result.dtype.itemsize == 8  # eight ranks of int8 would overflow


def in_stated_order(schedule: Schedule, values: list[np.ndarray]) -> list[np.ndarray]:
    """The whole schedule on whole arrays, transfer by transfer."""
    held = [value.copy() for value in values]
    bounds = [len(values[0]) * chunk // schedule.chunks for chunk in range(schedule.chunks + 1)]
    for each in schedule.rounds:
        place = {t: slice(bounds[t.chunk], bounds[t.chunk + 1]) for t in each.transfers()}
        sent = [(t, held[t.source][where].copy()) for t, where in place.items()]
        for t, value in sent:
            target = held[t.destination][place[t]]
            target[...] = target + value if t.op == "add" else value
    return held


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("world_size", [3, 4, 7])
def test_floats_have_the_bits_of_the_stated_order_on_every_rank(name: str, world_size: int) -> None:
    random = np.random.default_rng(world_size)
    values = [random.standard_normal(101).astype(np.float32) for _ in range(world_size)]
    schedule = make(name, world_size)
    results = simulate(schedule, values)
    expected = in_stated_order(schedule, values)
    for result, wanted in zip(results, expected, strict=True):
        assert result.tobytes() == wanted.tobytes() == results[0].tobytes()


def test_python_numbers_are_exact() -> None:
    values = [[Fraction(1, rank + 1), 10**30 + rank] for rank in range(5)]
    for result in simulate(tree(5), values):
        assert list(result) == [Fraction(137, 60), 5 * 10**30 + 10]
    thirds = [[Fraction(rank, 3)] for rank in range(5)]
    assert list(simulate(tree(5), thirds, "average")[0]) == [Fraction(2, 3)]


def test_a_length_that_chunks_do_not_divide_and_none_at_all() -> None:
    for size in (0, 1, 3, 10):
        values = [np.full(size, rank) for rank in range(7)]
        for schedule in (ring(7, 2), halving_doubling(7), hierarchical(7, hosts=[3, 4])):
            assert all(np.array_equal(result, np.full(size, 21)) for result in simulate(schedule, values))


def test_gathers_of_uneven_parts() -> None:
    parts = [np.arange(rank) + 100 * rank for rank in (3, 0, 4, 1, 5)]
    whole = np.concatenate(parts)
    for schedule in (ring(5, kind="all_gather"), halving_doubling(5, "all_gather"), ring(5, 3, kind="all_gather")):
        assert all(np.array_equal(result, whole) for result in simulate(schedule, parts))
    results = simulate(tree(5, "gather", 2), parts)
    assert np.array_equal(results[2], whole) and [r is None for r in results] == [True, True, False, True, True]


def test_scatters() -> None:
    values = [np.arange(13) * (rank + 1) for rank in range(5)]
    bounds = [13 * rank // 5 for rank in range(6)]
    for schedule in (ring(5, kind="reduce_scatter"), halving_doubling(5, "reduce_scatter")):
        for rank, result in enumerate(simulate(schedule, values)):
            assert np.array_equal(result, 15 * np.arange(13)[bounds[rank] : bounds[rank + 1]])
    given = [None, np.arange(13), None, None, None]
    for rank, result in enumerate(simulate(tree(5, "scatter", 1), given)):
        assert np.array_equal(result, np.arange(13)[bounds[rank] : bounds[rank + 1]])
    assert all(np.array_equal(result, np.arange(13)) for result in simulate(chain(5, root=1), given))


class Faulty:
    """A channel that does ``fault`` to the ``number``-th packet."""

    def __init__(self, number: int, fault: str) -> None:
        self.left, self.fault = number, fault

    def __call__(self, packet: Packet) -> tuple[Packet, ...]:
        self.left -= 1
        if self.left != -1:
            return (packet,)
        changed = {
            "phase": {"phase": "all_to_all"},
            "step": {"step": packet.header.step + 1},
            "round": {"round": packet.header.round + 1},
            "source": {"source": (packet.header.source + 1) % 5},
            "chunk": {"chunk": packet.header.chunk + 1},
            "op": {"op": "copy" if packet.header.op == "add" else "add"},
            "destination": {"destination": (packet.header.destination + 1) % 5},
            "stranger": {"destination": 5},
        }
        if self.fault in changed:
            return (replace(packet, header=replace(packet.header, **changed[self.fault])),)
        return {"lost": (), "twice": (packet, packet), "short": (replace(packet, payload=packet.payload[:-1]),)}[
            self.fault
        ]


@pytest.mark.parametrize(
    "fault",
    ["lost", "twice", "short", "phase", "step", "round", "source", "chunk", "op", "destination", "stranger"],
)
@pytest.mark.parametrize("number", [0, 7, 39])
def test_a_faulty_message_is_named_with_both_sides(fault: str, number: int) -> None:
    schedule = ring(5)
    packet = [t for each in schedule.rounds for t in each.transfers()][number]
    with pytest.raises(ProtocolError) as caught:
        simulate(schedule, [range(10)] * 5, channel=Faulty(number, fault))
    text = str(caught.value)
    assert f"round {number // 5}" in text
    if fault not in ("stranger", "source", "destination"):
        assert f"rank {packet.source}" in text and f"rank {packet.destination}" in text


def test_what_a_protocol_error_says() -> None:
    with pytest.raises(ProtocolError) as caught:
        simulate(ring(5), [range(10)] * 5, channel=Faulty(7, "step"))
    assert str(caught.value) == (
        "rank 3 expects chunk 1 from rank 2 to rank 3 to add (phase 'reduce_scatter', step 1, round 1), but rank 2 "
        "sent chunk 1 from rank 2 to rank 3 to add (phase 'reduce_scatter', step 2, round 1)."
    )
    with pytest.raises(ProtocolError, match="but nothing came"):
        simulate(ring(5), [range(10)] * 5, channel=Faulty(7, "lost"))


def test_what_cannot_be_played() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'average'"):
        simulate(ring(2), [[1], [2]], "averaged")
    with pytest.raises(ConfigurationError, match="needs as many values, got 1"):
        simulate(ring(2), [[1]])
    with pytest.raises(ConfigurationError, match="rank 1 needs a flat sequence"):
        simulate(ring(2), [[1], [[2]]])
    with pytest.raises(ConfigurationError, match="rank 1 needs a flat sequence"):
        simulate(ring(2), [[1], None])
    with pytest.raises(
        ConfigurationError, match=r"equal shapes and types, but rank 0 has int64\(2,\) and rank 1 float64"
    ):
        simulate(ring(2), [[1, 2], [2.0, 3.0]])


def test_everything_that_needs_no_torch_runs_without_it() -> None:
    code = """
import sys
sys.modules["torch"] = None  # an import of it raises
from drivetrain.comm import check, cost, counts, draw, schedule, schedules, scale, simulate, units, verify
made = schedules.make("hierarchical", 6)
check.check(made)
assert list(simulate.simulate(made, [[1, 2]] * 6)[3]) == [6, 12]
assert cost.predict(made, 1e6, cost.CostModel(cost.Link.of(1e-5, 1e9))) > 0
assert draw.text(made)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
