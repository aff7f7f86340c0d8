"""The cost model: closed forms where they are known, hosts that share a link, a fit that finds what it was given."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from drivetrain.comm.cost import CostModel, Link, Measurement, bus_bandwidth, fit, predict, profile
from drivetrain.comm.schedule import Schedule
from drivetrain.comm.schedules import make, names
from drivetrain.comm.topologies.halving_doubling import halving_doubling
from drivetrain.comm.topologies.hierarchical import hierarchical
from drivetrain.comm.topologies.ring import ring
from drivetrain.comm.topologies.tree import tree
from drivetrain.comm.units import parse_bandwidth, parse_size, parse_time, shown_rate, shown_size, shown_time
from drivetrain.errors import ConfigurationError

ALPHA, BETA, GAMMA = 50e-6, 1 / 1.25e9, 1 / 5e9
FLAT = CostModel(Link(ALPHA, BETA), reduction=GAMMA)
SIZE = 1e8


def test_closed_forms() -> None:
    """Thakur, Rabenseifner and Gropp's formulas, for numbers of ranks where they are exact."""
    for n in (2, 8, 64):
        log, share = math.log2(n), (n - 1) / n
        assert predict(ring(n), SIZE, FLAT) == pytest.approx(
            2 * (n - 1) * ALPHA + 2 * share * SIZE * BETA + share * SIZE * GAMMA
        )
        assert predict(halving_doubling(n), SIZE, FLAT) == pytest.approx(
            2 * log * ALPHA + 2 * share * SIZE * BETA + share * SIZE * GAMMA
        )
        assert predict(tree(n), SIZE, FLAT) == pytest.approx(2 * log * (ALPHA + SIZE * BETA) + log * SIZE * GAMMA)
        doubling = make("recursive_doubling", n)
        assert predict(doubling, SIZE, FLAT) == pytest.approx(log * (ALPHA + SIZE * (BETA + GAMMA)))
    assert predict(ring(1), SIZE, FLAT) == 0


def test_hosts_share_their_link_and_have_their_own_inside() -> None:
    model = CostModel(between=Link(1e-3, 1e-8), inside=Link(1e-5, 1e-10))
    # Two hosts of four: inside three steps of a quarter, between them one step of all four shards' halves, and back.
    expected = 2 * (3 * (1e-5 + SIZE / 4 * 1e-10) + (1e-3 + SIZE / 2 * 1e-8))
    schedule = hierarchical(8, hosts=[4, 4])
    assert predict(schedule, SIZE, model, hosts=[4, 4]) == pytest.approx(expected)
    # In the flat ring one rank of each host talks to the other host, in every round.
    assert predict(ring(8), SIZE, model, hosts=[4, 4]) == pytest.approx(14 * (1e-3 + SIZE / 8 * 1e-8))
    assert predict(schedule, SIZE, model, hosts=[8]) == pytest.approx(2 * (4e-5 + (3 / 4 + 1 / 8) * SIZE * 1e-10))
    with pytest.raises(ConfigurationError, match="do not add up to world_size=8"):
        predict(schedule, SIZE, model, hosts=[4, 3])


def test_a_profile_serves_all_sizes() -> None:
    found = profile(ring(6), [3, 3])
    for size in (0.0, 1e3, 1e9):
        assert found.seconds(size, FLAT) == predict(ring(6), size, FLAT, [3, 3])


def test_bus_bandwidth_is_that_of_the_links_for_an_optimal_algorithm() -> None:
    model = CostModel(Link(0, BETA))
    for n in (2, 5, 16):
        assert bus_bandwidth("all_reduce", n, SIZE, predict(ring(n), SIZE, model)) == pytest.approx(1.25e9)
        half = ring(n, kind="all_gather")
        assert bus_bandwidth("all_gather", n, SIZE, predict(half, SIZE, model)) == pytest.approx(1.25e9)
    assert bus_bandwidth("broadcast", 4, SIZE, 0.1) == SIZE / 0.1


def measured(model: CostModel, hosts: list[int] | None, noise: float = 0.0) -> list[Measurement]:
    random = np.random.default_rng(1)
    n = 8
    schedules: list[Schedule] = [make(name, n, hosts) for name in names()]
    return [
        Measurement(schedule, size, predict(schedule, size, model, hosts) * float(1 + noise * random.normal()), hosts)
        for schedule in schedules
        for size in (1e3, 1e5, 1e7, 1e8)
    ]


def test_fit_finds_the_model_that_made_the_times() -> None:
    model = CostModel(Link(2e-4, 1e-8), Link(3e-6, 1e-10), 1.5e-10)
    found = fit(measured(model, [4, 4]) + measured(model, [8]))
    assert found.inside is not None and model.inside is not None
    for a, b in ((found.between, model.between), (found.inside, model.inside)):
        assert (a.latency, a.seconds_per_byte) == pytest.approx((b.latency, b.seconds_per_byte), rel=1e-6)
    assert found.reduction == pytest.approx(1.5e-10, rel=1e-6)
    one_host = fit(measured(model, [8]))
    assert one_host.between == one_host.inside
    assert one_host.between.latency == pytest.approx(3e-6)
    flat = fit(measured(FLAT, None))
    assert flat.inside is None
    assert flat.between.seconds_per_byte == pytest.approx(BETA)


def test_fit_of_noisy_times_predicts_them() -> None:
    measurements = measured(FLAT, None, noise=0.05)
    found = fit(measurements)
    errors = [abs(predict(one.schedule, one.size_bytes, found) / one.seconds - 1) for one in measurements]
    assert float(np.median(errors)) < 0.06
    with pytest.raises(ConfigurationError, match="at least one measurement"):
        fit([])
    with pytest.raises(ConfigurationError, match="positive time"):
        fit([Measurement(ring(2), 1e3, 0.0)])


def test_fit_gives_no_negative_numbers() -> None:
    """Times that fall with the size would want a negative bandwidth."""
    found = fit([Measurement(ring(4), size, seconds) for size, seconds in ((1e3, 2.0), (1e6, 1.0), (1e7, 0.5))])
    assert found.between.latency > 0 and found.between.seconds_per_byte == 0 and found.reduction == 0


def test_a_model_is_kept_in_json(tmp_path: Path) -> None:
    for model in (FLAT, CostModel(Link(2e-4, 0.0), Link(3e-6, 1e-10), 1.5e-10)):
        model.save(tmp_path / "model.json")
        assert CostModel.load(tmp_path / "model.json") == model
    good = json.loads((tmp_path / "model.json").read_text())
    for change in ({"format": 2}, {"between": None}, {"reduction": -1}, {"reduction": "fast"}, {"inside": {}}):
        (tmp_path / "bad.json").write_text(json.dumps(good | change))
        with pytest.raises(ConfigurationError, match=r"bad\.json"):
            CostModel.load(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text(json.dumps(good | {"format": 2}))
    with pytest.raises(ConfigurationError, match=r"bad\.json is of format 2, not 1: calibrate again\.$"):
        CostModel.load(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("[1")
    for path in (tmp_path / "bad.json", tmp_path / "none.json"):
        with pytest.raises(ConfigurationError, match="cannot read a cost model"):
            CostModel.load(path)
    (tmp_path / "bad.json").write_text("[1]")
    with pytest.raises(ConfigurationError, match="holds no cost model"):
        CostModel.load(tmp_path / "bad.json")


def test_units() -> None:
    assert parse_size("100MB") == 1e8
    assert parse_size("25 MiB") == 25 * 2**20
    assert parse_size("1.5kB") == 1500
    assert parse_bandwidth("10Gbps") == parse_bandwidth("1.25GB/s") == parse_bandwidth("10Gbit/s") == 1.25e9
    assert parse_time("50us") == pytest.approx(5e-5)
    assert parse_time("0") == 0
    for parse, text, problem in (
        (parse_size, "100", "has no unit"),
        (parse_size, "MB", "is not a size"),
        (parse_size, "-1MB", "is not a size"),
        (parse_size, "0MB", "above zero"),
        (parse_size, "1mb", "has the unit 'mb'"),
        (parse_bandwidth, "10GB", "a bandwidth is written such as 10Gbps"),
        (parse_time, "3h", "has the unit 'h'"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            parse(text)
    assert (shown_size(1e8), shown_rate(1.25e9), shown_time(0.0123)) == ("100 MB", "1.25 GB/s", "12.3 ms")
    assert (shown_size(999.9), shown_time(90.0)) == ("1 kB", "90 s")


def test_links_of_bandwidths() -> None:
    assert Link.of(1e-6, 1e9) == Link(1e-6, 1e-9)
    for latency, bandwidth in ((-1.0, 1.0), (0.0, 0.0), (math.nan, 1.0)):
        with pytest.raises(ConfigurationError, match="a link needs"):
            Link.of(latency, bandwidth)
