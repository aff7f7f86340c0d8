"""A signal stops a run within seconds, with a checkpoint from which it goes on to the same bits."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import drivetrain.callbacks
import drivetrain.lightning
from drivetrain import checkpoint
from drivetrain.errors import Interrupted
from drivetrain.launch import handling
from tests.faults.programs import Slow, train
from tests.launch.programs import all_gone, descendants, forked, wait_for
from tests.patience import GONE, LIMIT, SOON
from tests.resume.runs import assert_same
from tests.runs import QUIET, Classifier, loader


def _go_on(folder: Path, temporary: str, strategy: str, devices: int) -> None:
    tempfile.tempdir = temporary  # nobody is left to remove what a killed launcher had there
    train(folder, strategy, devices, Slow(folder, "train", 0, 0.03), resume="auto")


def _searching(*arguments: Any) -> None:
    """A trial of a search, which goes on with the next one whatever a fit raises."""
    with suppress(Exception):
        train(*arguments)


def _stopped(folder: Path, signum: int, moment: str, step: int, strategy: str, devices: int) -> None:
    """Send ``signum`` to the run's process group, as a terminal does, when it has reached ``moment``."""
    slow = Slow(folder, moment, step)
    with forked(_searching, folder, strategy, devices, slow) as process:
        assert process.pid is not None
        wait_for(*(folder / f"reached_{rank}" for rank in range(devices)))
        below = descendants(process.pid)
        began = time.monotonic()
        os.killpg(
            process.pid, signum
        )  # workers have groups of their own, so a terminal's Ctrl-C reaches the parent only
        process.join(LIMIT)
        assert time.monotonic() - began < SOON
        assert process.exitcode == 128 + signum
        assert all_gone(below, GONE)


@pytest.mark.parametrize(
    ("moment", "signum", "strategy", "devices"),
    [
        ("train", signal.SIGINT, "single", 1),
        ("validation", signal.SIGTERM, "single", 1),
        ("train", signal.SIGTERM, "ddp", 2),
        ("validation", signal.SIGINT, "ring", 2),
    ],
)
def test_stopped_and_resumed(moment: str, signum: int, strategy: str, devices: int, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    train(whole, strategy, devices)
    _stopped(stopped, signum, moment, 3, strategy, devices)
    last = checkpoint.find.resolve("last", stopped / "checkpoints")
    assert last is not None
    assert checkpoint.load(last).meta["global_step"] >= 3
    assert not (stopped / "end.ckpt").exists()
    train(stopped, strategy, devices, resume="last")
    assert_same(whole, stopped, devices, best=False)


class Asked(Classifier):
    """One rank is told to stop in its last batch of a validation, at whose end the ranks exchange something."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.trainer.global_rank == 1 and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_epoch_end(self) -> None:
        assert self.trainer.strategy.broadcast("a word") == "a word"


@pytest.mark.parametrize("face", [drivetrain, drivetrain.lightning])
def test_a_signal_that_one_rank_has_heard_of(face: Any, tmp_path: Path) -> None:
    saving = face.callbacks.ModelCheckpoint(tmp_path / "checkpoints", every_n_epochs=9)
    options: dict[str, Any] = {**QUIET, "enable_checkpointing": None, "num_sanity_val_steps": 0, "timeout": SOON}
    trainer = face.Trainer(
        strategy="ddp", devices=2, precision="64-true", callbacks=[saving], default_root_dir=tmp_path, **options
    )
    with pytest.raises(Interrupted):
        trainer.fit(Asked(), loader(16), loader(12, 2, shuffle=False))
    (saved,) = (tmp_path / "checkpoints").glob("*.ckpt")
    assert checkpoint.resolve(saved, tmp_path) == saved


def test_a_signal_from_before_a_stage_is_heard_in_it() -> None:
    """A worker is told to stop while it makes its module, or between training and testing."""
    module, trainer = Classifier(), drivetrain.Trainer(max_epochs=9, **QUIET)
    with handling():
        os.kill(os.getpid(), signal.SIGTERM)
        for stage in (trainer.fit, trainer.validate):
            with pytest.raises(Interrupted):
                stage(module, loader())
    assert trainer.current_epoch == 0


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ring", 2)])
def test_stopped_before_the_first_step(strategy: str, devices: int, tmp_path: Path) -> None:
    _stopped(tmp_path, signal.SIGTERM, "sanity", 0, strategy, devices)
    assert checkpoint.find.resolve("auto", tmp_path / "checkpoints") is None
    train(tmp_path, strategy, devices, resume="auto", max_steps=1)
    assert (tmp_path / "end.ckpt").exists()


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2)])
def test_killed_at_random_moments(strategy: str, devices: int, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    train(whole, strategy, devices)
    chance = random.Random(devices)
    with tempfile.TemporaryDirectory() as temporary:
        for _ in range(5):
            (killed / "reached_0").unlink(missing_ok=True)
            with forked(_go_on, killed, temporary, strategy, devices) as process:
                assert process.pid is not None
                wait_for(killed / "reached_0")
                time.sleep(chance.uniform(0, 0.4))
                below = descendants(process.pid)
                process.kill()
                process.join()
                assert all_gone(below, GONE)
            if (killed / "end.ckpt").exists():
                break
    train(killed, strategy, devices, resume="auto")
    assert_same(whole, killed, devices, best=False)
