"""ModelCheckpoint: when it saves, what it keeps, what ``last`` means, how it goes on."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.errors import ConfigurationError, TrainingError
from drivetrain_plugins.callbacks.checkpoint_name import format_name
from drivetrain_plugins.callbacks.model_checkpoint import ModelCheckpoint

LOSSES = [0.5, 0.3, 0.4, 0.2, 0.6]


def losses(epoch: int) -> dict[str, float]:
    return {"val/loss": LOSSES[epoch]}


def names(folder: str | Path | None) -> list[str]:
    assert folder is not None
    return sorted(os.listdir(folder))


def test_default_keeps_the_newest(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint()
    trainer = make_trainer(checkpoint).fit(3)
    assert trainer.saved == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"]
    assert checkpoint.dirpath == str(tmp_path / "checkpoints")
    assert names(checkpoint.dirpath) == ["epoch=2-step=12.ckpt"]
    assert checkpoint.best_model_path == str(tmp_path / "checkpoints" / "epoch=2-step=12.ckpt")
    assert checkpoint.best_model_score is None
    assert checkpoint.last_model_path == ""


def test_log_dir_is_preferred(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint()
    make_trainer(checkpoint, log_dir=tmp_path / "version_0").fit(1)
    assert names(tmp_path / "version_0" / "checkpoints") == ["epoch=0-step=4.ckpt"]


@pytest.mark.parametrize(("top_k", "kept"), [(1, [3]), (2, [1, 3]), (3, [1, 2, 3]), (-1, [0, 1, 2, 3, 4]), (0, [])])
def test_top_k(make_trainer: Callable[..., Any], top_k: int, kept: list[int]) -> None:
    checkpoint = ModelCheckpoint(monitor="val/loss", save_top_k=top_k)
    trainer = make_trainer(checkpoint).fit(5, losses)
    assert names(checkpoint.dirpath) == [f"epoch={epoch}-step={4 * epoch + 4}.ckpt" for epoch in kept]
    assert [Path(path).name for path in trainer.saved] == trainer.saved
    if kept:
        assert Path(checkpoint.best_model_path).name == "epoch=3-step=16.ckpt"
        assert checkpoint.best_model_score == torch.tensor(0.2, dtype=torch.float64)
        worst = max(kept, key=lambda epoch: LOSSES[epoch])
        assert Path(checkpoint.kth_best_model_path).name.startswith(f"epoch={worst}-")
        assert {float(score) for score in checkpoint.best_k_models.values()} == {LOSSES[epoch] for epoch in kept}
    assert checkpoint.current_score == torch.tensor(0.6, dtype=torch.float64)


def test_mode_max_and_nan_is_worst(make_trainer: Callable[..., Any]) -> None:
    values = [math.nan, 0.1, math.nan, 0.3, -math.inf]
    checkpoint = ModelCheckpoint(monitor="acc", mode="max", save_top_k=2)
    trainer = make_trainer(checkpoint)
    trainer.fit(5, lambda epoch: {"acc": values[epoch]})
    assert names(checkpoint.dirpath) == ["epoch=1-step=8.ckpt", "epoch=3-step=16.ckpt"]
    assert not checkpoint.check_monitor_top_k(trainer, torch.tensor(math.nan))
    assert checkpoint.check_monitor_top_k(trainer, torch.tensor(0.2))


def test_monitor_of_the_training_epoch_moves_the_save(make_trainer: Callable[..., Any]) -> None:
    checkpoint = ModelCheckpoint(monitor="train/loss", filename="{epoch}-{train/loss:.1f}")
    trainer = make_trainer(checkpoint).fit(3, train=lambda epoch: {"train/loss": LOSSES[epoch]})
    assert trainer.saved == ["epoch=0-train_loss=0.5.ckpt", "epoch=1-train_loss=0.3.ckpt"], "not a stale value"


def test_without_validation_at_the_end_of_the_epoch(make_trainer: Callable[..., Any]) -> None:
    checkpoint = ModelCheckpoint(every_n_epochs=2)
    trainer = make_trainer(checkpoint, num_val_batches=[]).fit(5)
    assert trainer.saved == ["epoch=1-step=8.ckpt", "epoch=3-step=16.ckpt"]


def test_every_n_train_steps_with_accumulation(make_trainer: Callable[..., Any]) -> None:
    checkpoint = ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)
    trainer = make_trainer(checkpoint)
    trainer.fit(2)
    assert trainer.saved == ["epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"]
    trainer.call("on_train_start")
    trainer.global_step = 9
    for index in range(3):  # micro-batches that share a step
        trainer.call("on_train_batch_end", None, None, index)
    assert trainer.saved[2:] == ["epoch=2-step=9.ckpt"]


def test_train_time_interval_uses_the_agreed_clock(make_trainer: Callable[..., Any]) -> None:
    checkpoint = ModelCheckpoint(train_time_interval=timedelta(seconds=5), save_top_k=-1)
    trainer = make_trainer(checkpoint, agreed_seconds=1000.0).fit(3)  # the clock of a resumed run goes on
    assert trainer.saved == ["epoch=1-step=6.ckpt", "epoch=2-step=11.ckpt"]


def test_nothing_in_fast_dev_run_sanity_check_or_validate(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(save_last=True)
    make_trainer(checkpoint, fast_dev_run=True).fit(2)
    assert os.listdir(tmp_path) == []
    trainer = make_trainer(ModelCheckpoint(), global_step=7)
    trainer.call("setup", "validate")
    trainer.validate_now()
    assert trainer.saved == []


@pytest.mark.parametrize("save_last", [True, "link"])
@pytest.mark.parametrize("top_k", [-1, 0, 1, 2])
@pytest.mark.parametrize("monitor", [None, "val/loss"])
def test_last_is_always_a_complete_checkpoint(
    make_trainer: Callable[..., Any], tmp_path: Path, save_last: Any, top_k: int, monitor: str | None
) -> None:
    if monitor is None and top_k == 2:
        top_k = -1
    checkpoint = ModelCheckpoint(monitor=monitor, save_top_k=top_k, save_last=save_last)
    trainer = make_trainer(checkpoint)
    folder = tmp_path / "checkpoints"

    def last_is_complete() -> None:
        if trainer.saved:
            target = os.readlink(folder / "last.ckpt")
            assert "/" not in target and target != "last.ckpt"
            assert target == trainer.saved[-1]
            assert (folder / target / "manifest.json").is_file()

    trainer.on_save = last_is_complete
    trainer.fit(5, losses)
    last_is_complete()
    if save_last is True or top_k in (0, -1) or monitor is None:
        assert trainer.saved[-1] == "epoch=4-step=20.ckpt", "the newest, though it is not among the best"
    kept = {Path(path).name for path in checkpoint.best_k_models} | {Path(checkpoint.best_model_path or "x").name}
    everything = [f"epoch={epoch}-step={4 * epoch + 4}.ckpt" for epoch in range(5)]
    expected = everything if top_k == -1 else sorted((kept - {"x"}) | {trainer.saved[-1]})
    assert names(folder) == [*expected, "last.ckpt"]
    assert checkpoint.last_model_path == str(folder / "last.ckpt")
    shutil.move(folder, tmp_path / "moved")
    assert (tmp_path / "moved" / "last.ckpt" / "manifest.json").is_file()


def test_old_one_goes_only_when_the_new_one_is_complete(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(monitor="val/loss", save_last=True)
    trainer = make_trainer(checkpoint)

    def fail_at_third() -> None:
        if len(trainer.saved) == 2:
            raise OSError("disk full")

    trainer.on_save = fail_at_third
    with pytest.raises(OSError, match="disk full"):
        trainer.fit(5, lambda epoch: {"val/loss": -float(epoch)})
    assert names(checkpoint.dirpath) == ["epoch=1-step=8.ckpt", "last.ckpt"]
    assert Path(checkpoint.best_model_path).name == "epoch=1-step=8.ckpt", "what failed is not remembered"
    assert checkpoint.best_model_score == torch.tensor(-1.0)


def test_resume_goes_on(make_trainer: Callable[..., Any]) -> None:
    straight = ModelCheckpoint(monitor="val/loss", save_top_k=2, save_last=True)
    make_trainer(straight).fit(5, losses)
    expected = names(straight.dirpath)
    shutil.rmtree(straight.dirpath or "")

    first = ModelCheckpoint(monitor="val/loss", save_top_k=2, save_last=True)
    trainer = make_trainer(first)
    trainer.fit(3, losses)
    again = ModelCheckpoint(monitor="val/loss", save_top_k=2, save_last=True)
    resumed = make_trainer(again, current_epoch=3, global_step=12)
    resumed.fit(2, losses, resume=first.last_model_path)
    assert names(again.dirpath) == expected
    assert again.best_k_models == straight.best_k_models
    assert os.readlink(again.last_model_path) == "epoch=4-step=20.ckpt"


def test_resume_finishes_the_deletion_a_kill_prevented(make_trainer: Callable[..., Any]) -> None:
    first = ModelCheckpoint(monitor="val/loss")
    trainer = make_trainer(first)
    trainer.fit(1, losses)
    left = Path(first.best_model_path)
    shutil.copytree(left, left.with_name("copy"))
    trainer.fit(1, losses)
    shutil.move(left.with_name("copy"), left)  # as if the process had died before deleting
    again = ModelCheckpoint(monitor="val/loss")
    make_trainer(again, current_epoch=2, global_step=8).fit(0, losses, resume=first.best_model_path)
    assert names(again.dirpath) == ["epoch=1-step=8.ckpt"]


def test_state_brought_back_from_workers(make_trainer: Callable[..., Any]) -> None:
    worker, caller = (ModelCheckpoint(monitor="val/loss", save_last=True, save_top_k=2) for _ in range(2))
    make_trainer(worker).fit(3, losses)
    caller.load_state_dict(worker.state_dict())
    for name in ("dirpath", "best_model_path", "best_model_score", "last_model_path", "best_k_models"):
        assert getattr(caller, name) == getattr(worker, name)
    assert len(make_trainer(caller).fit(3, losses).saved) == 3, "another fit starts over, with step 12 saved again"


def test_resume_into_another_folder_remembers_the_best(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    first = ModelCheckpoint(dirpath=tmp_path / "old", monitor="val/loss")
    make_trainer(first).fit(2, losses)
    again = ModelCheckpoint(dirpath=tmp_path / "new", monitor="val/loss")
    trainer = make_trainer(again, current_epoch=2, global_step=8)
    trainer.fit(0, losses, resume=first.best_model_path)
    assert again.best_model_path == first.best_model_path
    trainer.fit(1, losses)
    assert names(tmp_path / "old") == ["epoch=1-step=8.ckpt"], "the old run's folder is left alone"
    assert again.best_model_path == str(tmp_path / "new" / "epoch=2-step=12.ckpt")


def test_resume_from_a_moved_folder(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    first = ModelCheckpoint(dirpath=tmp_path / "old", monitor="val/loss")
    make_trainer(first).fit(2, losses)
    shutil.move(tmp_path / "old", tmp_path / "new")
    again = ModelCheckpoint(dirpath=tmp_path / "new", monitor="val/loss")
    make_trainer(again, current_epoch=2, global_step=8).fit(3, losses, resume=tmp_path / "new" / "epoch=1-step=8.ckpt")
    assert names(tmp_path / "new") == ["epoch=3-step=16.ckpt"]


def test_names_that_are_taken_get_a_version(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "best.ckpt").mkdir(parents=True)
    first = ModelCheckpoint(filename="best")
    second = ModelCheckpoint(filename="best", every_n_train_steps=4, save_top_k=-1)
    trainer = make_trainer(first, second).fit(2)
    assert trainer.saved == ["best-v1.ckpt", "best-v2.ckpt", "best-v3.ckpt", "best-v2.ckpt"]
    assert names(first.dirpath) == ["best-v1.ckpt", "best-v2.ckpt", "best-v3.ckpt", "best.ckpt"]


def test_fixed_name_is_replaced_in_place(make_trainer: Callable[..., Any]) -> None:
    checkpoint = ModelCheckpoint(filename="best", monitor="val/loss")
    trainer = make_trainer(checkpoint).fit(5, losses)
    assert trainer.saved == ["best.ckpt"] * 3
    assert names(checkpoint.dirpath) == ["best.ckpt"]


def test_what_cannot_be_removed_does_not_end_training(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = ModelCheckpoint(filename="{epoch}")
    trainer = make_trainer(checkpoint)
    checkpoint.filename = "stuck"
    trainer.fit(1)
    checkpoint.filename = "{epoch}"
    trainer.fit(1)
    assert names(checkpoint.dirpath) == ["epoch=1.ckpt", "stuck.ckpt"]
    assert "an old checkpoint stays" in caplog.text


def test_missing_monitor_is_named(make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    sentence = r"monitor='val/los'.*step 4; did you mean 'val/loss'\? \(known: acc, val/loss\).*self\.log"
    with pytest.raises(TrainingError, match=sentence):
        make_trainer(ModelCheckpoint(monitor="val/los")).fit(2, lambda epoch: {"val/loss": 1.0, "acc": 0.0})
    with pytest.raises(TrainingError, match=r"step 4; known: none"):
        make_trainer(ModelCheckpoint(monitor="x"), num_val_batches=[]).fit(1)
    checkpoint = ModelCheckpoint(monitor="val/loss", every_n_train_steps=2, save_last=True)
    trainer = make_trainer(checkpoint).fit(2, losses)
    assert trainer.saved == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt", "epoch=1-step=6.ckpt", "epoch=1-step=8.ckpt"]
    assert "val/loss is not logged yet at step 2" in caplog.text


def test_save_now_is_the_newest_and_no_more(make_trainer: Callable[..., Any]) -> None:
    checkpoint = ModelCheckpoint(monitor="val/loss", save_last=True)
    trainer = make_trainer(checkpoint).fit(1, losses)
    assert checkpoint.save_now(trainer) == checkpoint.best_model_path, "it is there already"
    assert len(trainer.saved) == 1
    trainer.global_step = 6
    path = Path(checkpoint.save_now(trainer))
    assert path.name == "epoch=1-step=6.ckpt"
    assert os.readlink(checkpoint.last_model_path) == path.name
    again = ModelCheckpoint(monitor="val/loss", save_last=True)
    trainer = make_trainer(again, current_epoch=1, global_step=6)
    trainer.fit(1, losses, resume=path)
    assert names(again.dirpath) == ["epoch=1-step=10.ckpt", "last.ckpt"], "it went with the next save"
    assert ModelCheckpoint().save_now(make_trainer(fast_dev_run=True)) == ""


def test_unwritable_folder(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigurationError, match=r"cannot be written to .*file/sub \(Not a directory\): choose another"
    ):
        make_trainer(ModelCheckpoint(dirpath=tmp_path / "file" / "sub")).fit(1)


def test_other_ranks_follow_the_first(
    make_trainer: Callable[..., Any], follower: Callable[[Any], Any], tmp_path: Path
) -> None:
    folder = str(tmp_path / "of_rank_0")
    checkpoint = ModelCheckpoint(monitor="val/loss", filename="of rank 1", save_last=True)
    first = follower([folder, ["best.ckpt"], None, "best"])
    trainer = make_trainer(checkpoint, world_size=2, global_rank=1, communicator=first)
    trainer.fit(5, losses)
    assert trainer.saved[0] == "best-v1.ckpt"
    assert checkpoint.dirpath == folder
    assert os.listdir(tmp_path) == [], "only the first rank touches files"
    problem = follower([folder, [], "Permission denied", None])
    with pytest.raises(ConfigurationError, match="Permission denied"):
        make_trainer(ModelCheckpoint(), world_size=2, global_rank=1, communicator=problem).fit(1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"mode": "best"}, "use 'min' or 'max'"),
        ({"save_top_k": -2, "monitor": "x"}, "use -1 for all"),
        ({"save_top_k": 2}, "needs a monitor"),
        ({"every_n_train_steps": 2, "every_n_epochs": 1}, "exclude each other"),
        ({"every_n_train_steps": -1}, "use 0 or more"),
        ({"train_time_interval": timedelta(0)}, "positive duration"),
        ({"save_last": "copy"}, "use True, False or 'link'"),
        ({"save_last": True, "filename": "sub/{epoch}"}, "last.ckpt cannot point at it"),
    ],
)
def test_arguments_that_do_not_go_together(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        ModelCheckpoint(**arguments)


def test_format_name() -> None:
    values = {"epoch": 2, "step": 63, "val/loss": torch.tensor(0.3217)}
    assert format_name(None, values) == "epoch=2-step=63"
    assert format_name("{epoch:02d}-{val/loss:.2f}", values) == "epoch=02-val_loss=0.32"
    assert format_name("e{epoch}_{val/loss:.1f}_{absent}", values, insert_names=False) == "e2_0.3_0.0"
    with pytest.raises(ConfigurationError, match="is not a format for a number"):
        format_name("{val/loss:q}", values)
