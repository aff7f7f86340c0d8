"""``last.ckpt`` of a run: a relative link to the newest checkpoint, which moves with its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drivetrain import Callback, Trainer, checkpoint
from tests.faults.programs import train
from tests.resume.runs import assert_same


def test_the_last_link_moves_with_the_run(tmp_path: Path) -> None:
    train(tmp_path / "whole", "ring", 2)
    train(tmp_path / "run", "ring", 2, max_epochs=2)
    moved = (tmp_path / "run").rename(tmp_path / "moved") / "checkpoints"
    link = moved / "last.ckpt"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == checkpoint.find.resolve("last", moved) == checkpoint.find.newest(moved)
    assert checkpoint.load(link, world_size=2).meta["global_step"] == 6
    train(tmp_path / "moved", "ring", 2, resume=str(link))
    assert_same(tmp_path / "whole", tmp_path / "moved", 2, best=False)
    assert checkpoint.load(link, world_size=2).meta["global_step"] == 12


class Steps(Callback):
    """The optimizer steps done when each batch began."""

    def __init__(self) -> None:
        self.at: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
        self.at.append(trainer.global_step)


def test_a_folder_of_checkpoints_means_its_last(tmp_path: Path) -> None:
    train(tmp_path, "single", 1, max_epochs=1)
    (tmp_path / "end.ckpt").rename(tmp_path / "earlier.ckpt")
    seen = Steps()
    train(tmp_path, "single", 1, seen, resume=str(tmp_path / "checkpoints"), max_steps=4)
    assert set(seen.at) == {2, 3}, "it began at the newest checkpoint, of step 2"
    assert checkpoint.load(tmp_path / "end.ckpt").meta["global_step"] == 4
