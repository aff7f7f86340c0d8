"""Resuming with several workers, and with another number of them than before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.resume.runs import Everything, assert_same, end, fit, noisy_loader
from tests.runs import loader


@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 2), ("ring", 2), ("ddp", 3), ("ring", 3)])
def test_the_same_bits(strategy: str, devices: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": strategy, "devices": devices}
    whole = fit(tmp_path / "whole", "batch", "validation", **options)
    for name in ("1-batch-0", "4-batch-1", "2-validation-0"):
        resumed = fit(tmp_path / name, data=noisy_loader(), resume=whole / f"{name}.ckpt", **options)
        assert_same(whole, resumed, devices, best=False)


@pytest.mark.parametrize(
    ("before", "after"), [(("ddp", 2), ("single", 1)), (("single", 1), ("ddp", 3)), (("ring", 3), ("ring", 2))]
)
@pytest.mark.parametrize("moment", ["2-batch-0", "4-validation-1"])
def test_another_number_of_workers(
    moment: str, before: tuple[str, int], after: tuple[str, int], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    def run(folder: Path, place: tuple[str, int], *moments: str, resume: Path | None = None) -> dict[str, Any]:
        module, data = Everything(dropout=0.0), loader(18, 4)
        options = {"strategy": place[0], "devices": place[1]}
        return end(fit(folder, *moments, module=module, data=data, resume=resume, **options), 0, place[1])

    whole = run(tmp_path / "whole", before, "batch", "validation")
    resumed = run(tmp_path / "resumed", after, resume=tmp_path / "whole" / f"{moment}.ckpt")
    curves = [state["loops"]["loss_curve"] for state in (whole, resumed)]
    assert [step for step, _ in curves[0]] == [step for step, _ in curves[1]]
    assert max(abs(a - b) for (_, a), (_, b) in zip(*curves, strict=True)) < 1e-10
    for name, value in whole["state_dict"].items():
        assert float((value - resumed["state_dict"][name]).abs().max()) < 1e-10
    metrics = [state["metrics"]["callback"] for state in (whole, resumed)]
    assert metrics[0].keys() == metrics[1].keys() >= {"train/loss_epoch", "train/samples", "val/loss"}
    for name in metrics[0].keys() - {"train/worst"}:  # the worst is of one rank's part
        assert abs(metrics[0][name] - metrics[1][name]) < 1e-10, name
