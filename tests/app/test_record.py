from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from drivetrain import compare, record
from drivetrain.errors import ConfigurationError


def make(folder: Path, **values: Any) -> Path:
    """A run folder with a record."""
    folder.mkdir()
    blank = record.blank(strategy="ring", world_size=2, devices=2, num_nodes=1, seed=1, recipe="mnist")
    record.write(folder, {**blank, "status": "completed", "global_step": 2, "weights_digest": "d", **values})
    return folder


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "a", metrics={"loss": math.nan, "best": math.inf})
    assert json.loads((folder / "run.json").read_text())["metrics"] == {"loss": "nan", "best": "inf"}
    assert math.isnan(record.read(folder)["metrics"]["loss"])
    before = (folder / "run.json").read_text()
    with pytest.raises(TypeError):
        record.write(folder, {"status": object()})

    def broken(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="no space"):
        record.write(folder, {"status": "failed"})
    assert (folder / "run.json").read_text() == before
    assert [path.name for path in folder.iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", [None, "{", "[]", '{"a": 1}'])
def test_what_is_no_record_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"run\.json"):
        record.read(tmp_path)


def test_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = [[1, 0.5], [2, 0.25]]
    a = make(tmp_path / "a", loss_curve=curve, metrics={"val/acc": 0.9, "val/time": 3.0, "samples_per_second": 1.0})
    b = make(tmp_path / "b", loss_curve=curve, metrics={"val/acc": 0.9, "val/time": 9.0, "samples_per_second": 2.0})
    assert compare.main([str(a), str(b), "--tolerance", "0"]) == 0
    assert "same digest" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "what", "where"),
    [
        ({"loss_curve": [[1, 0.5], [2, 0.26]]}, "loss curve", "step 2"),
        ({"loss_curve": [[1, 0.5]]}, "loss curve", "step 2"),
        ({"loss_curve": [[1, math.nan], [2, 0.25]]}, "loss curve", "step 1"),
        ({"metrics": {"val/acc": 0.8}}, "metrics", "val/acc"),
        ({"metrics": {}}, "metrics", "val/acc"),
        ({"global_step": 3}, "optimizer steps", ""),
        ({"weights_digest": "other"}, "weights", "no checkpoint"),
    ],
)
def test_what_differs_is_found(
    values: dict[str, Any], what: str, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = {"loss_curve": [[1, 0.5], [2, 0.25]], "metrics": {"val/acc": 0.9}}
    a, b = make(tmp_path / "a", **same), make(tmp_path / "b", **{**same, **values})
    assert compare.main([str(a), str(b), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    differing = [one for one in told["differences"] if one["largest"] != 0.0]
    assert [one["what"] for one in differing] == [what]
    assert where in differing[0]["where"]
    finite = differing[0]["largest"] != "inf"
    assert compare.main([str(a), str(b), "--tolerance", "0.2"]) == (0 if finite and what != "optimizer steps" else 1)


def test_weights_are_compared_from_the_last_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from drivetrain.checkpoint import save

    runs = []
    for name, shift in (("a", 0.0), ("b", 1e-3)):
        run = make(tmp_path / name, weights_digest=name, checkpoints={"best": None, "last": "elsewhere/last.ckpt"})
        weights = {"one.weight": torch.zeros(3), "two.bias": torch.tensor([1.0, 2.0 + shift], dtype=torch.float64)}
        save(run / "checkpoints" / "last.ckpt", shared={"state_dict": weights})
        runs.append(str(run))
    assert compare.main([*runs, "--tolerance", "1e-2"]) == 0
    assert "two.bias" in capsys.readouterr().out
    assert compare.main(runs) == 1


def test_tensors() -> None:
    import torch

    a = {"w": torch.tensor([1.0, math.inf, math.nan])}
    assert compare.tensors(a, {"w": a["w"].clone()}).largest == 0.0
    assert compare.tensors(a, {"w": torch.tensor([1.0, math.inf, 0.0])}).largest == math.inf
    assert compare.tensors(a, {"w": torch.zeros(2)}).largest == math.inf
    assert "v is in one run only" in compare.tensors(a, {**a, "v": a["w"]}).where


def test_unreadable_input_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = make(tmp_path / "a")
    assert compare.main([str(good), str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert compare.main([str(good), str(good), "--tolerance", "-1"]) == 2
