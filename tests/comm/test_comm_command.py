"""``python -m drivetrain.comm``: what it prints, and one sentence where it is asked for nonsense."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain.comm.__main__ import main
from drivetrain.comm.check import check
from drivetrain.comm.cost import CostModel, Link
from drivetrain.comm.schedule import Schedule
from drivetrain.comm.schedules import names
from drivetrain.comm.topologies.ring import ring
from drivetrain.comm.verify import algorithms

FABRIC = ["--bandwidth", "10Gbps", "--latency", "50us"]


def test_verify_prints_a_line_for_each_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--up-to", "4", "--also", "32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    lines = [line for line in lines if line.strip()]
    assert len(lines) == len(algorithms())
    for name, line in zip(algorithms(), lines, strict=True):
        assert line.startswith(name) and "proved for 5 world sizes" in line
    assert "at 32 ranks 62 rounds, 1.938 of the tensor per rank" in next(x for x in lines if x.startswith("ring "))


def wrong(world_size: int) -> Schedule:
    right = ring(world_size)
    return Schedule("wrong", world_size, right.chunks, right.rounds[:-1])


def test_verify_fails_for_a_wrong_topology(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.comm.schedules.names", lambda: ["stranger"])
    monkeypatch.setattr("drivetrain.comm.schedules.topology", lambda name: wrong)
    assert main(["verify", "--up-to", "5", "--only", "stranger,tree gather"]) == 1
    out = capsys.readouterr().out
    assert "FAILED: schedule 'wrong' for 2 ranks: rank 0, chunk 0" in out
    assert "tree gather  proved for 5" in out


def test_scale_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--workers", "64,8", "--size", "100MB", *FABRIC, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["size_bytes"] == 1e8
    rows = {(row["topology"], row["workers"]): row for row in found["predictions"]}
    assert {name for name, _ in rows} == set(names()) and {workers for _, workers in rows} == {8, 64}
    assert rows["ring", 8]["seconds"] == pytest.approx(14 * 50e-6 + 2 * 7 / 8 * 1e8 / 1.25e9)
    for workers, name in found["best"].items():
        assert rows[name, int(workers)]["seconds"] == min(rows[n, int(workers)]["seconds"] for n in names())


def test_scale_prints_and_plots(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "scale.png"
    words = ["--per-host", "4", "--host-bandwidth", "100GB/s", "--host-latency", "5us", "--reduction", "20GB/s"]
    assert main(["scale", "--workers", "1,6,16", "--size", "1MB", *FABRIC, *words, "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "best" in out and all(name in out for name in names())
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert main(["scale", "--workers", "2", "--size", "1MB", *FABRIC, "--plot", str(tmp_path / "no" / "x.png")]) == 2
    assert "has no folder" in capsys.readouterr().err


def test_scale_plots_beside_what_is_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    words = ["scale", "--workers", "4", "--size", "1MB", *FABRIC]
    (tmp_path / "scale-1MB.png").write_text("mine")
    assert main(words) == 0
    assert capsys.readouterr().out.endswith("plot: scale-1MB-2.png\n")
    assert (tmp_path / "scale-1MB-2.png").read_bytes()[:4] == b"\x89PNG"
    for more in (["--no-plot"], ["--json"]):
        assert main([*words, *more]) == 0
    assert main([*words, "--json", "--plot", "asked.png"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "plot: asked.png\n" and captured.out.rstrip().endswith("}")
    assert {path.name for path in tmp_path.iterdir()} == {"scale-1MB.png", "scale-1MB-2.png", "asked.png"}
    assert (tmp_path / "scale-1MB.png").read_text() == "mine"
    monkeypatch.setattr("drivetrain.comm.command.find_spec", lambda name: None)
    assert main(words) == 0
    assert capsys.readouterr().err == "no plot: matplotlib is not installed\n"
    assert main([*words, "--plot", "asked.png"]) == 2
    assert "install drivetrain[docs]" in capsys.readouterr().err


def test_scale_takes_a_calibrated_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    CostModel(Link(1e-3, 1e-9)).save(tmp_path / "model.json")
    words = ["scale", "--workers", "4", "--size", "1MB", "--topologies", "ring", "--json"]
    assert main([*words, "--model", str(tmp_path / "model.json")]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"][0]["seconds"] == pytest.approx(6e-3 + 1.5e-3)
    assert main([*words, "--model", str(tmp_path / "model.json"), *FABRIC]) == 2
    assert "leave the others out" in capsys.readouterr().err


def test_draw_as_text_and_image(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["draw", "ring", "--workers", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "rounds: 4, most sent by a rank: 4/3 of the tensor" in lines[0]
    assert lines[1].split() == ["0", "reduce_scatter", "0", "0→1", "+0", "1→2", "+1", "2→0", "+2"]
    assert lines[4].split() == ["3", "all_gather", "1", "0→1", "=0", "1→2", "=1", "2→0", "=2"]
    pytest.importorskip("matplotlib")
    image = tmp_path / "drawing.png"
    assert main(["draw", "hierarchical", "--workers", "5", "--hosts", "2,3", "--output", str(image)]) == 0
    assert image.read_bytes()[:4] == b"\x89PNG"


PAGE = Path(__file__).parents[2] / "docs" / "collectives.md"
BLOCKS = re.findall(
    r"^```console\n\$ python -m drivetrain\.comm (.*)\n([\s\S]*?)\n```$", PAGE.read_text(), re.MULTILINE
)


@pytest.mark.parametrize(("words", "shown"), [block for block in BLOCKS if not block[0].startswith("verify")])
def test_the_documentation_shows_what_commands_print(
    words: str, shown: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words.startswith("scale"):
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.strip("\n").splitlines()]
    assert printed == shown.splitlines()


def test_the_documentation_verifies_every_algorithm() -> None:
    (shown,) = [shown for words, shown in BLOCKS if words.startswith("verify")]
    assert [line.split("  ")[0] for line in shown.splitlines()] == list(algorithms())
    assert all(" proved for 134 world sizes" in line for line in shown.splitlines())


def test_the_documentation_runs() -> None:
    examples = re.findall(r"^```python\n([\s\S]*?)^```$", PAGE.read_text(), re.MULTILINE)
    assert len(examples) == 2
    places: dict[str, Any] = {}
    for example in examples:
        exec(example, places)
    for world_size in (1, 2, 5):
        assert check(places["star"](world_size)).rounds == 2 * (world_size - 1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("nothing", "there is no command 'nothing'"),
        ("drawn ring", "did you mean 'draw'"),
        ("verify --up-to 0", "leaves nothing to prove"),
        ("verify --up-to many", "invalid int value: 'many'"),
        ("verify --also 5,x", "are no whole numbers"),
        ("verify --also 0", "must each be 1 or more"),
        ("verify --only rings", "did you mean 'ring'"),
        ("verify --only ,", "names no algorithm"),
        ("scale --size 1MB", "required: --workers"),
        ("scale --workers 8 --size 1MB", "needs --bandwidth and --latency"),
        ("scale --workers 8 --size 1 --bandwidth 1Gbps --latency 1us", "'1' has no unit"),
        ("scale --workers 8 --size 1MB --bandwidth 1Gbps --latency 1us --per-host 0", "pass 1 or more"),
        ("scale --workers 8 --size 1MB --bandwidth 1Gbps --latency 1us --topologies star", "no topology 'star'"),
        ("scale --workers 8 --size 1MB --bandwidth 1Gbps --latency 1us --plot x.png --no-plot", "not allowed with"),
        ("scale --workers 8 --size 1MB --model /none.json", "cannot read a cost model"),
        ("scale --workers 8,99999999999999999999 --size 1MB --bandwidth 1Gbps --latency 1us", "32768 or less"),
        ("scale --workers 1 --size 1MB --bandwidth 1Gbps --latency 1us --plot x.png", "one worker alone sends nothing"),
        ("verify --up-to 99999999", "pass 32768 or less"),
        ("verify --also 99999999999999999999", "32768 or less"),
        ("calibrate --seconds inf", "above zero and finite"),
        ("calibrate --workers 9999", "9999 ranks on"),
        ("draw rang", "did you mean 'ring'"),
        ("draw ring --workers 65", "cannot be drawn legibly"),
        ("draw hierarchical --workers 4 --hosts 2,3", "do not add up to world_size=4"),
    ],
)
def test_mistakes_are_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ")
    assert sentence in captured.err and captured.err.count("\n") == 1


def test_help_and_the_module_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0 and main([]) == 2
    assert "verify" in capsys.readouterr().out
    for command in ("verify", "scale", "draw"):
        with pytest.raises(SystemExit) as left:
            main([command, "--help"])
        assert left.value.code == 0
    ran = subprocess.run([sys.executable, "-m", "drivetrain.comm", "draw"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and ran.stderr.startswith("error: the following arguments are required: topology")
