"""A disk that takes no more: the run ends with a sentence, and what was saved before is whole."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain import Callback, app, checkpoint
from drivetrain.checkpoint.agreement import reason
from drivetrain.errors import CheckpointError, WorkerError
from drivetrain.launch import launch
from tests.faults.programs import train
from tests.resume.runs import assert_same


class Full(Callback):
    """From step ``step`` on the system refuses every file of more than ``limit`` bytes to rank ``rank``."""

    def __init__(self, step: int, rank: int, limit: int = 512) -> None:
        self.step, self.rank, self.limit = step, rank, limit

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))

    def on_exception(self, trainer: Any, *rest: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _fills(folder: Path, strategy: str, devices: int, rank: int) -> str:
    try:
        train(folder, strategy, devices, Full(5, rank))
    except (CheckpointError, WorkerError) as error:
        return str(error).splitlines()[0]
    return "it ended"


@pytest.mark.parametrize(("strategy", "devices", "rank"), [("single", 1, 0), ("ddp", 2, 0), ("ring", 2, 1)])
def test_the_checkpoint_before_stays(
    strategy: str, devices: int, rank: int, tmp_path: Path, run_alone: Callable[..., Any]
) -> None:
    whole, full = tmp_path / "whole", tmp_path / "full"
    full.mkdir()
    said = run_alone(_fills, full, strategy, devices, rank)
    assert "step=6.ckpt was not saved" in said
    assert "File too large" in said
    assert "the checkpoints before it are still there" in said
    kept = full / "checkpoints"
    assert {path.name for path in kept.iterdir()} == {"epoch=1-step=4.ckpt", "last.ckpt"}
    last = checkpoint.find.resolve("last", kept)
    assert last is not None
    assert checkpoint.load(last).meta["global_step"] == 4
    train(whole, strategy, devices)
    train(full, strategy, devices, resume="last")
    assert_same(whole, full, devices, best=False)


def test_the_way_out_is_told() -> None:
    assert "free space" in reason(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert "free space" not in reason(PermissionError(errno.EACCES, "Permission denied", "here"))


def _no_room(folder: Path) -> list[Any]:
    os.chdir(folder)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):  # the captured one is a file too
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
        code = app.run(["strategy=single", "hydra.run.dir=run"])
    return [code, said.getvalue()]


def test_a_run_folder_without_room(tmp_path: Path, run_alone: Callable[..., Any]) -> None:
    code, said = run_alone(_no_room, tmp_path)
    assert code == 1
    assert "cannot be written: File too large; free space or choose hydra.run.dir" in said
    assert "Traceback" not in said


def _no_room_for_reports(folder: Path) -> str:
    def fails(job: Any, payload: Any) -> None:
        if job.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
            raise ValueError("as it must")

    with pytest.raises(WorkerError) as caught:
        launch(fails, {}, workers=2)
    return str(caught.value)


def test_a_rank_that_cannot_report(tmp_path: Path, run_alone: Callable[..., Any]) -> None:
    assert run_alone(_no_room_for_reports, tmp_path).startswith("rank 1 failed: exited with code 1")
