"""What callbacks of ours make of the losses of steps that several ranks, or several pieces of a batch, have part in."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from drivetrain.callbacks import LearningRateFinder, SpikeDetection
from tests.runs import Classifier, Outcome, difference, loader, train

OPTIONS: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 4}
STEPS = 9  # windows of two batches in an epoch of seven give three


class Adam(Classifier):
    """Servers keep states of it that a range test changes."""

    def __init__(self) -> None:
        super().__init__("adamw")


def searched(strategy: Any, devices: int) -> tuple[Outcome, dict[str, list[float]]]:
    finder = LearningRateFinder(0.01, 20.0, STEPS, early_stop_threshold=1.5, update_attr=False)
    found = train(Adam, strategy, devices, data=loader(50, 8), callbacks=[finder], **OPTIONS)
    assert finder.optimal_lr is not None
    return found, finder.optimal_lr.results


@cache
def reference() -> tuple[Outcome, dict[str, list[float]]]:
    plain, (found, results) = train(Adam, data=loader(50, 8), **OPTIONS), searched("single", 1)
    assert set(difference(plain, found).values()) == {0.0}
    assert 3 < len(results["loss"]) < STEPS, "it ends where the loss diverges"
    return found, results


@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 3), ("pipeline", 2), ("parameter_server", 3)])
def test_a_range_test_notes_the_losses_of_one_process_and_leaves_no_trace(strategy: str, devices: int) -> None:
    (single, wanted), (found, results) = reference(), searched(strategy, devices)
    assert results["lr"] == pytest.approx(wanted["lr"], abs=1e-12)
    assert results["loss"] == pytest.approx(wanted["loss"], abs=1e-12)
    assert max(difference(single, found).values()) < 1e-10


def test_spikes_are_looked_for_in_the_losses_of_whole_batches_under_a_pipeline(tmp_path: Path) -> None:
    """Those of pieces, of two samples, leap."""
    for strategy, devices in (("single", 1), ("pipeline", 2)):
        spikes = SpikeDetection(rtol=0.1, exclude_batches_path=tmp_path)
        train(Adam, strategy, devices, data=loader(48, 8), max_epochs=1, callbacks=[spikes])
