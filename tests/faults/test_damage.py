"""Checkpoints that were damaged, or half-written when rank 0 was killed: a run goes on from the one before."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path

import pytest

from drivetrain import Callback, Trainer, checkpoint
from tests.faults.programs import train
from tests.launch.programs import all_gone, descendants, forked, wait_for
from tests.patience import GONE, LIMIT, SOON
from tests.resume.runs import assert_same


def _damage(path: Path, how: str) -> None:
    largest = max((one for one in path.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
    if how == "gone":
        largest.unlink()
    elif how == "short":
        os.truncate(largest, largest.stat().st_size // 2)
    else:
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)


class Began(Callback):
    """Writes down the step at which training goes on, on each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, *rest: object) -> None:
        (self.folder / f"began_{trainer.global_rank}").write_text(str(trainer.global_step))


@pytest.mark.parametrize(
    ("strategy", "devices", "resume", "how"),
    [
        ("single", 1, "auto", "bit"),
        ("single", 1, "last", "short"),
        ("ddp", 2, "last", "gone"),
        ("ring", 2, "auto", "bit"),
    ],
)
def test_a_damaged_newest_checkpoint_is_passed_over(
    strategy: str, devices: int, resume: str, how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    train(whole, strategy, devices)
    train(stopped, strategy, devices, keep=-1, max_steps=6)
    kept = checkpoint.find.ordered(stopped / "checkpoints")
    steps = [checkpoint.load(path, world_size=devices).meta["global_step"] for path in kept]
    assert steps[:2] == [6, 4]
    _damage(kept[0], how)
    capfd.readouterr()
    with forked(_go_on, stopped, strategy, devices, resume) as process:
        process.join(LIMIT)
        assert process.exitcode == 0
    said = capfd.readouterr().out
    assert said.count("going back to the checkpoint before it") == 1 and kept[0].name in said
    assert {(stopped / f"began_{rank}").read_text() for rank in range(devices)} == {"4"}
    assert_same(whole, stopped, devices, best=False)


def _go_on(folder: Path, strategy: str, devices: int, resume: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest: print(message, flush=True)  # else pytest keeps them to itself
        train(folder, strategy, devices, Began(folder), keep=-1, resume=resume)


class DiesWhileSaving(Callback):
    """Rank 0 kills itself at a file operation of the first checkpoint after step 3."""

    def __init__(self, operation: str) -> None:
        self.operation = operation

    def on_train_batch_start(self, trainer: Trainer, *rest: object) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 3:
            setattr(os, self.operation, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))  # of the worker only


@pytest.mark.parametrize("operation", ["fsync", "rename"])
@pytest.mark.parametrize("strategy", ["ddp", "ring"])
def test_rank_0_is_killed_while_it_saves(
    strategy: str, operation: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    train(whole, strategy, 2)
    with forked(train, killed, strategy, 2, DiesWhileSaving(operation)) as process:
        assert process.pid is not None
        wait_for(killed / "checkpoints" / "last.ckpt")
        below = descendants(process.pid)
        began = time.monotonic()
        process.join(LIMIT)
        assert process.exitcode == 128 + signal.SIGKILL
        assert time.monotonic() - began < SOON
        assert all_gone(below, GONE)
    assert "rank 0 failed: killed by SIGKILL" in capfd.readouterr().out
    kept = killed / "checkpoints"
    assert any(path.name.startswith(".") for path in kept.iterdir()), "it was not killed in the middle of saving"
    assert [checkpoint.load(path).meta["global_step"] for path in checkpoint.find.ordered(kept)[:1]] == [2]
    train(killed, strategy, 2, resume="auto")
    assert_same(whole, killed, 2, best=False)
    assert not any(path.name.startswith(".") for path in kept.iterdir())
