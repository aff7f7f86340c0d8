"""Calibrating and sweeping as commands, on real ranks: what they report is complete and adds up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.comm import calibrate, measure
from drivetrain.comm.__main__ import main
from drivetrain.comm.calibration import stored
from drivetrain.comm.cost import bus_bandwidth
from drivetrain.comm.measure import _contenders as contenders
from drivetrain.errors import ConfigurationError
from drivetrain_plugins.bench.comm import main as bench
from tests.patience import LIMIT

SHORT = ["--repeats", "1", "--seconds", "0.01"]


def command(folder: Path, *words: str) -> str:
    """What ``python -m ...`` prints."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "TMPDIR": str(folder)}
    call = [sys.executable, "-m", *words, *SHORT]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_calibrate_then_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a job are calibrated as they are; a sweep starts ranks of its own."""
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "-m")
    words = ("calibrate", "--sizes", "4KB,64KB", "--topologies", "ring,tree")
    printed = command(tmp_path, *torchrun, "drivetrain.comm", *words)
    assert printed.count("written to") == 1 and str(tmp_path / "drivetrain" / "calibration-cpu.json") in printed
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = stored("cpu")
    assert made is not None and set(made.worlds) == {(2,)} and set(made.worlds[2,].corrections) == {"ring", "tree"}
    figure = tmp_path / "sweep.png"
    words = (
        "--workers",
        "2",
        "--sizes",
        "8KB,64KB",
        "--operations",
        "all",
        "--algorithms",
        "ring,tree",
        "--segments",
        "2",
    )
    told = json.loads(command(tmp_path, "drivetrain.bench", "comm", *words, "--json", "--plot", str(figure)))
    assert figure.read_bytes().startswith(b"\x89PNG")
    rows = told["rows"]
    cells = {(row["operation"], row["algorithm"], row["size_bytes"]) for row in rows}
    sizes = (8000, 64000)
    expected = {("all_reduce", name) for name in ("native", "ring", "tree", "ring in 2 segments")}
    expected |= {(each, name) for each in ("reduce_scatter", "all_gather") for name in ("native", "ring")}
    expected |= {(each, name) for each in ("broadcast", "reduce") for name in ("native", "tree")}
    assert cells == {(*cell, size) for cell in expected for size in sizes} and len(rows) == len(cells)
    native = {(row["operation"], row["size_bytes"]): row["seconds"] for row in rows if row["algorithm"] == "native"}
    for row in rows:
        assert 0 < row["least"] <= row["seconds"]
        assert row["ratio"] == row["seconds"] / native[row["operation"], row["size_bytes"]]
        assert row["bus_bandwidth"] == bus_bandwidth(row["operation"], 2, row["size_bytes"], row["seconds"])
        if row["operation"] == "all_reduce" and row["algorithm"] in ("native", "ring", "tree"):
            assert row["predicted"] == made.predict(row["algorithm"], row["size_bytes"], (2,))
            assert row["chosen"] == (row["algorithm"] == made.choose(row["size_bytes"], (2,)))
    summary = told["summary"]
    assert summary["auto_cells"] == 2 and 0 <= summary["auto_within_10_percent"] <= 2
    taken = [row for row in rows if row["chosen"]]
    named = [r for r in rows if r["operation"] == "all_reduce" and " " not in r["algorithm"]]
    best = [min(r["seconds"] for r in named if r["size_bytes"] == size) for size in sizes]
    assert summary["auto_worst"] == max(row["seconds"] / least for row, least in zip(taken, best, strict=True))
    assert summary["median_error"] > 0 and summary["median_error_of_the_model"] > 0


def test_requests_that_cannot_be_met_are_refused() -> None:
    for words, reason in (
        (["--operations", "all_reduse"], "did you mean 'all_reduce'"),
        (["--algorithms", "rign"], "did you mean 'ring'"),
        (["--repeats", "0"], "above zero"),
        (["--workers", "1"], "2 or more"),
        (["--device", "cuda", "--workers", "64"], "64 ranks need as many GPUs"),
        (["--segments", "1"], "2 or more"),
        (["--seconds", "inf"], "above zero and finite"),
        (["--sizes", "1e30B"], "do not fit into"),
        (["--workers", "2,9999"], "9999 ranks on"),
        (["--workers", "99999999999999999999"], "32768 or less"),
        (["--thread-blocks", "32"], "add --device cuda"),
        (["--thread-blocks", "65", "--device", "cuda"], "64 at most"),
        (["--nonsense"], "has no option"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            bench(words)


def test_calibrating_in_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured is what is predicted; nothing is started here."""
    asked = []

    def measured(requests: list[measure.Request], workers: int) -> list[measure.Measured]:
        asked.append((workers, requests[0].names, requests[0].sizes))
        samples = [measure.Sample(name, size, 1e-6 * size, 1.0, 1) for name in requests[0].names for size in (8, 800)]
        return [measure.Measured((workers,), samples)]

    monkeypatch.setattr(measure, "measure", measured)
    made = calibrate([3, 2, 3], names=["ring"], sizes=(8, 800))
    assert asked == [(workers, ("native", "ring"), (8, 800)) for workers in (2, 3)]
    assert made.predict("native", 80, (3,)) == pytest.approx(8e-5) and set(made.worlds) == {(2,), (3,)}
    for load, said in ((0.0, ""), (1000.0, "others used the machine (load 1000.0")):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, load, load))
        assert main(["calibrate", "--topologies", "ring", "--output", str(tmp_path / "made.json")]) == 0
        captured = capsys.readouterr()
        assert captured.err.startswith(said) and bool(captured.err) == bool(said) and "written to" in captured.out
    for words, reason in (
        ({"workers": [1]}, "workers=1 is too small: pass 2 or more"),
        ({"workers": 4}, r"pass them as a list, such as \[2, 4\]"),
        ({"names": ["rign"]}, "did you mean 'ring'"),
        ({"device": "gpu"}, "pass 'cpu'"),
        ({"repeats": 0}, "repeats=0 is too small"),
        ({"seconds": float("inf")}, "must be above zero and finite"),
        ({"sizes": (10**20,)}, "do not fit into"),
        ({"workers": [2, 9999]}, "9999 ranks on"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            calibrate(**words)  # type: ignore[arg-type]


def test_only_what_may_be_best_is_timed_further() -> None:
    times = {
        "all_reduce/native": [9.0, 9.0, 9.0],
        "all_reduce/ring": [1.0, 1.0, 1.0],
        "all_reduce/tree": [5.0, 5.0, 1.5],  # once it was near
        "all_reduce/chain": [2.0, 2.0, 1.9],
        "broadcast/tree": [50.0, 60.0, 70.0],  # the best of its own operation
    }
    medians = {"all_reduce/native": 9.0, "all_reduce/ring": 1.0, "all_reduce/tree": 5.0, "broadcast/tree": 60.0}
    assert contenders(times) == medians
