"""What was measured is kept and predicted again; what was not is left to the model; a choice falls back to native."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.comm.__main__ import main
from drivetrain.comm.calibration import Calibration, Curve, place, stored
from drivetrain.comm.cost import CostModel, Link, predict
from drivetrain.comm.schedules import make
from drivetrain.errors import ConfigurationError

MODEL = CostModel(Link(50e-6, 1e-9), Link(20e-6, 0.5e-9), 0.1e-9)
SIZES = (1e3, 1e5, 1e7)
NAMES = ("ring", "tree", "recursive_doubling", "halving_doubling")
WORLDS = ((2,), (4,), (2, 2))


def times(name: str, hosts: tuple[int, ...], model: CostModel = MODEL) -> dict[float, float]:
    return {size: predict(make(name, sum(hosts), hosts), size, model, hosts) for size in SIZES}


def calibration(native: float = 1.0) -> Calibration:
    """Of a machine that is as the model says, whose own all-reduce takes ``native`` times that of a ring."""
    measured = {hosts: {name: times(name, hosts) for name in NAMES} for hosts in WORLDS}
    for hosts, algorithms in measured.items():
        algorithms["native"] = {size: native * seconds for size, seconds in times("ring", hosts).items()}
    return Calibration.of(measured)


def test_a_machine_that_is_as_the_model_is_found_again() -> None:
    made = calibration()
    for name in (*NAMES, "hierarchical"):
        for hosts in (*WORLDS, (3,), (4, 4)):  # the last two, and hierarchical, were not measured
            for size in (*SIZES, 2e4, 1e9):
                expected = predict(make(name, sum(hosts), hosts), size, MODEL, hosts)
                assert made.predict(name, size, hosts) == pytest.approx(expected, rel=1e-6), (name, hosts, size)


def test_what_deviates_is_corrected_where_it_was_measured() -> None:
    measured = {(2,): {name: times(name, (2,)) for name in NAMES}}
    measured[(2,)]["tree"] = {size: 3 * seconds for size, seconds in measured[(2,)]["tree"].items()}
    measured[(2,)]["native"] = dict(measured[(2,)]["ring"])
    made = Calibration.of(measured)
    for name in NAMES:
        for size in SIZES:
            assert made.predict(name, size, (2,)) == pytest.approx(measured[(2,)][name][size], rel=1e-9)
    bare = made.predict("tree", 1e7, (2,), corrected=False)
    assert bare is not None and bare < 0.9 * measured[(2,)]["tree"][1e7]


def test_the_fastest_is_chosen_and_native_where_nothing_is_faster() -> None:
    made = calibration(native=1.2)
    assert made.choose(1000, (4,)) == "recursive_doubling"
    assert made.choose(10**7, (4,)) == "halving_doubling"  # a ring's bytes in fewer rounds
    assert calibration(native=0.5).choose(10**7, (4,)) == "native"
    assert made.choose(1000, (3,)) == "native"  # not measured
    assert made.choose(0, (4,)) == "native"
    # A tie is no reason to leave the transport's own.
    tie = {"ring": times("ring", (2,)), "native": {size: 1.02 * took for size, took in times("ring", (2,)).items()}}
    assert Calibration.of({(2,): tie}).choose(10**6, (2,)) == "native"


def test_native_is_known_only_where_it_was_measured() -> None:
    made = calibration(native=2.0)
    assert made.predict("native", 1e5, (4,)) == pytest.approx(2 * times("ring", (4,))[1e5])
    assert made.predict("native", 1e9, (4,)) == pytest.approx(200 * times("ring", (4,))[1e7])
    assert made.predict("native", 1e5, (5,)) is None
    with pytest.raises(ConfigurationError, match="needs the transport's own"):
        Calibration.of({(2,): {"ring": times("ring", (2,))}})


def test_between_and_beyond_what_was_measured() -> None:
    curve = Curve((1.0, 100.0), (2.0, 8.0))
    assert [curve.ratio(size) for size in (0.1, 1.0, 10.0, 100.0, 1e3)] == pytest.approx([2.0, 2.0, 5.0, 8.0, 8.0])
    assert [curve.time(size) for size in (0.1, 1.0, 50.5, 100.0, 1e3)] == pytest.approx([2.0, 2.0, 5.0, 8.0, 80.0])


def test_kept_in_the_users_own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert place("cpu") == tmp_path / "drivetrain" / "calibration-cpu.json"
    assert stored("cpu") is None
    made = calibration()
    made.save(place("cpu"))
    assert stored("cpu") == made
    assert [path.name for path in place("cpu").parent.iterdir()] == ["calibration-cpu.json"]
    # It is a model for scale too.
    assert CostModel.load(place("cpu")) == made.model
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the standard says to ignore
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert place("cuda") == tmp_path / "home" / ".cache" / "drivetrain" / "calibration-cuda.json"


def broken() -> list[Any]:
    good = calibration().plain()
    world = good["worlds"][0]
    return [
        [],
        {},
        {**good, "format": 99},
        {**good, "between": {"latency": -1.0, "seconds_per_byte": 1.0}},
        {**good, "reduction": 10**400},
        {**good, "worlds": [{**world, "native": {"sizes": [1.0], "values": [10**400]}}]},
        {**good, "worlds": [{**world, "hosts": [0]}]},
        {**good, "worlds": [{**world, "native": {"sizes": [2.0, 1.0], "values": [1.0, 1.0]}}]},
        {**good, "worlds": [{**world, "native": {"sizes": [], "values": []}}]},
        {**good, "worlds": [{**world, "corrections": {"ring": {"sizes": [1.0], "values": ["1"]}}}]},
    ]


@pytest.mark.parametrize("found", broken())
def test_a_file_that_is_no_calibration_is_refused(found: Any, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigurationError, match=r"holds no calibration.*calibrate again"):
        Calibration.load(path)


@pytest.mark.parametrize("text", ["", '{"format": 1, "betw', "[" * 100_000, "\0", "1" * 5000])
def test_a_file_that_was_not_written_whole_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    for load in (Calibration.load, CostModel.load):
        with pytest.raises(ConfigurationError, match="calibrate again"):
            load(path)
    path.write_text(json.dumps({**calibration().plain(), "reduction": 10**400}))
    with pytest.raises(ConfigurationError, match=r"holds no cost model.*calibrate again"):
        CostModel.load(path)


def test_a_topology_that_is_gone_is_not_chosen(tmp_path: Path) -> None:
    """A calibration outlives the package of a topology that it measured, and may have been the fastest."""
    found = calibration().plain()
    for world in found["worlds"]:
        world["corrections"]["star"] = {"sizes": [1.0], "values": [1e-9]}
    made = Calibration.of_plain(found)
    assert {made.choose(size, hosts) for hosts in made.worlds for size in (1, 10**6)} == {
        calibration().choose(size, hosts) for hosts in made.worlds for size in (1, 10**6)
    }


def test_predict_says_what_to_do_and_what_auto_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["predict", "--size", "1MB"]) != 0
    assert "python -m drivetrain.comm calibrate" in capsys.readouterr().err
    (tmp_path / "other.json").write_text("{")
    assert main(["predict", "--size", "1MB", "--model", str(tmp_path / "other.json")]) != 0
    assert "is no JSON" in capsys.readouterr().err
    calibration().save(place("cpu"))
    assert main(["predict", "--size", "1kB", "--workers", "2,4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["predictions"]
    assert [row["algorithm"] for row in rows if row["chosen"] and row["workers"] == 4] == ["recursive_doubling"]
    assert main(["predict", "--size", "1kB", "--workers", "4"]) == 0
    assert "recursive_doubling *" in capsys.readouterr().out
