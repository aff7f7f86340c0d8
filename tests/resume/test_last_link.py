"""``last.ckpt`` of a run: a relative link to the newest checkpoint, which moves with its folder."""

from __future__ import annotations

from pathlib import Path

from drivetrain import checkpoint
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


def test_a_folder_of_checkpoints_means_its_last(tmp_path: Path) -> None:
    train(tmp_path, "single", 1, max_epochs=1)
    (tmp_path / "end.ckpt").rename(tmp_path / "earlier.ckpt")
    train(tmp_path, "single", 1, resume=str(tmp_path / "checkpoints"), max_steps=4)
    assert checkpoint.load(tmp_path / "end.ckpt").meta["global_step"] == 4
    assert [step for step, _ in checkpoint.load(tmp_path / "end.ckpt").shared["loops"]["loss_curve"]] == [1, 2, 3, 4]
