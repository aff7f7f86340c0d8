"""A run that is resumed more than once within one epoch, and one that had stopped of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain import Trainer
from drivetrain_plugins.callbacks.early_stopping import EarlyStopping
from drivetrain_plugins.callbacks.model_checkpoint import ModelCheckpoint
from tests.resume.runs import assert_same, fit
from tests.runs import QUIET, Classifier, loader


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2), ("ring", 3)])
def test_resumed_twice_within_an_epoch(strategy: str, devices: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": strategy, "devices": devices, "accumulate_grad_batches": 1}
    whole = fit(tmp_path / "whole", **options)
    first = fit(tmp_path / "first", "batch", max_steps=1, **options)
    second = fit(tmp_path / "second", "batch", max_steps=3, resume=first / "1-batch-0.ckpt", **options)
    third = fit(tmp_path / "third", resume=second / "3-batch-0.ckpt", **options)
    assert_same(whole, third, devices, best=False)


class Counted(Classifier):
    """Notes every training batch, and logs a value to watch that never improves."""

    def __init__(self, notes: Path) -> None:
        super().__init__()
        self.notes = notes

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with open(self.notes, "a") as file:
            file.write(f"{self.trainer.global_rank}\n")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val/never", 1.0)


@pytest.mark.parametrize("check_on_train_epoch_end", [True, False])
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ring", 2)])
def test_a_run_that_had_stopped_early_stays_stopped(
    strategy: str, devices: int, check_on_train_epoch_end: bool, tmp_path: Path
) -> None:
    def run(resume: str | None) -> tuple[Trainer, EarlyStopping, int]:
        notes = tmp_path / f"batches-{resume}"
        notes.touch()
        stopping = EarlyStopping("val/never", patience=1, check_on_train_epoch_end=check_on_train_epoch_end)
        trainer = Trainer(
            **{**QUIET, "enable_checkpointing": None},
            strategy=strategy,
            devices=devices,
            precision="64-true",
            max_epochs=6,
            seed=3,
            num_sanity_val_steps=0,
            callbacks=[stopping, ModelCheckpoint(tmp_path / "checkpoints", save_last=True)],
        )
        trainer.fit(Counted(notes), loader(), loader(23, 5, shuffle=False), ckpt_path=resume)
        return trainer, stopping, len(notes.read_text().splitlines())

    first, stopping, batches = run(None)
    assert (first.current_epoch, batches) == (2, 2 * 7 * devices)
    assert stopping.stopped_epoch == 1
    for resume in ("last", "auto"):
        again, stopping, batches = run(resume)
        assert batches == 0
        assert (again.current_epoch, again.global_step) == (first.current_epoch, first.global_step)
        assert (stopping.stopped_epoch, stopping.wait_count) == (1, 1)
        assert again.should_stop
