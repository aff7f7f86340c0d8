"""Projects that write, read and delete checkpoints in their own way, and checkpoints that are written in a thread."""

from __future__ import annotations

import importlib
import pickle
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as theirs
import pytest
import torch

import drivetrain.lightning as ours
from drivetrain.errors import CheckpointError, ConfigurationError, WorkerError
from tests.facade.recorder import QUIET

SIDES = [theirs, ours]
SETTINGS: dict[str, Any] = {**QUIET, "enable_checkpointing": True, "logger": False, "num_sanity_val_steps": 0}


def noted(library: Any, folder: Path) -> Any:
    """A CheckpointIO of a format of its own, which writes down what it is asked for."""

    class Noted(library.plugins.CheckpointIO):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.log = folder / "log.txt"

        def note(self, what: str, path: Any) -> None:
            with open(self.log, "a") as stream:
                stream.write(f"{what} {Path(path).name}\n")

        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            self.note("save", path)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            torch.save([b"mine", checkpoint], path)

        def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
            self.note("load", path)
            mark, content = torch.load(path, map_location=map_location, weights_only=False)
            assert mark == b"mine"
            return content

        def remove_checkpoint(self, path: Any) -> None:
            self.note("remove", path)
            Path(path).unlink()

        def teardown(self) -> None:
            self.note("teardown", "")

    return Noted()


def trained(library: Any, folder: Path, epochs: int, io: Any, ckpt_path: Any = None, **options: Any) -> Any:
    torch.manual_seed(3)
    module = importlib.import_module(f"{library.__name__}.demos.boring_classes").BoringModel()
    saver = library.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=1)
    plugins = {} if io is None else {"plugins": [io]}
    trainer = library.Trainer(
        **{**SETTINGS, "max_epochs": epochs, "limit_train_batches": 3, "limit_val_batches": 1, **plugins, **options},
        callbacks=[saver],
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def test_a_format_of_the_projects_own(tmp_path: Path) -> None:
    """It is asked for the same, in the same order, and training goes on from what it gives."""
    asked, weights = [], []
    for library in SIDES:
        folder = tmp_path / library.__name__
        folder.mkdir()
        io = noted(library, folder)
        trained(library, folder, 2, io).validate(ckpt_path="best", verbose=False)
        trained(library, folder, 3, io, ckpt_path=folder / "epoch=1.ckpt")
        asked.append((folder / "log.txt").read_text().splitlines())
        content = io.load_checkpoint(folder / "epoch=2.ckpt")
        assert content["epoch"] == 2 and content["global_step"] == 9
        weights.append(content["state_dict"]["layer.weight"])
    assert asked[0] == asked[1]
    assert [line for line in asked[1] if "save" in line or "load" in line] == [
        *("save epoch=0.ckpt", "save epoch=1.ckpt", "load epoch=1.ckpt", "load epoch=1.ckpt", "save epoch=2.ckpt")
    ]
    assert torch.equal(weights[0], weights[1])


def test_of_several_workers_the_first_writes_and_all_read(tmp_path: Path) -> None:
    io = noted(ours, tmp_path)
    trained(ours, tmp_path, 1, io, devices=2, strategy="ddp")
    trained(ours, tmp_path, 2, io, devices=2, strategy="ddp", ckpt_path=tmp_path / "epoch=0.ckpt")
    lines = io.log.read_text().splitlines()
    assert [line for line in lines if "teardown" not in line] == [
        *("save epoch=0.ckpt", "load epoch=0.ckpt", "load epoch=0.ckpt", "save epoch=1.ckpt")
    ]
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        trained(ours, tmp_path, 2, io, ckpt_path=tmp_path / "none.ckpt")


class Slow(ours.plugins.TorchCheckpointIO):
    """Writes when it is told to, in a thread that it notes."""

    def __init__(self) -> None:
        self.may, self.threads = threading.Event(), set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        assert self.may.wait(20), "training waits for its checkpoint"
        self.threads.add(threading.current_thread().name)
        super().save_checkpoint(checkpoint, path)


class Lets(ours.Callback):  # type: ignore[misc, name-defined]
    """Lets ``io`` write at the last batch; keeps the weights after each, and what files there were then."""

    def __init__(self, io: Slow, folder: Path) -> None:
        self.io, self.folder, self.weights, self.files = io, folder, [], []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.files.append(len(list(self.folder.glob("*.ckpt"))))
        if batch_idx == 3:
            self.io.may.set()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append({name: value.clone() for name, value in module.state_dict().items()})


def test_training_goes_on_while_a_thread_writes(tmp_path: Path) -> None:
    """What is written is what there was, and the end waits for it."""
    slow = Slow()
    lets = Lets(slow, tmp_path)
    saver = ours.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = ours.Trainer(
        **{**SETTINGS, "max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 0},
        callbacks=[lets, saver],
        plugins=[ours.plugins.AsyncCheckpointIO(slow)],
    )
    trainer.fit(ours.demos.BoringModel())
    assert lets.files == [0, 0, 0, 0] and len(slow.threads) == 1
    assert threading.main_thread().name not in slow.threads
    assert not [thread for thread in threading.enumerate() if thread.name in slow.threads]
    for step, weights in enumerate(lets.weights, start=1):
        found = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert found["global_step"] == step
        assert all(torch.equal(found["state_dict"][name], value) for name, value in weights.items())
    trainer.save_checkpoint(tmp_path / "after.ckpt")  # the script goes on when it is there
    assert (tmp_path / "after.ckpt").exists() and threading.active_count() == 1


class Counting(ours.demos.BoringModel):  # type: ignore[misc, name-defined]
    """Its checkpoints hold what it counts, in a dictionary of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: Any = defaultdict(int)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.steps["done"] += 1
        self.log("done", float(self.steps["done"]))
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["steps"] = self.steps


class LetsInTheEnd(ours.Callback):  # type: ignore[misc, name-defined]
    def __init__(self, io: Slow) -> None:
        self.io = io

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.io.may.set()


def test_what_is_not_written_yet_has_its_name_and_its_content(tmp_path: Path) -> None:
    """However long writing takes, files are named as if each had been written at once, and hold what there was."""
    slow = Slow()
    slow.may.set()
    written = {}
    for name, io in (("once", slow), ("thread", ours.plugins.AsyncCheckpointIO(slow))):
        if name == "thread":
            slow.may.clear()
        saver = ours.callbacks.ModelCheckpoint(
            tmp_path / name, filename="best", monitor="done", mode="max", save_top_k=2, every_n_train_steps=1
        )
        trainer = ours.Trainer(
            **{**SETTINGS, "max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 0},
            callbacks=[LetsInTheEnd(slow), saver],
            plugins=[io],
        )
        trainer.fit(Counting())
        found = {file.name: torch.load(file, weights_only=False) for file in (tmp_path / name).iterdir()}
        assert {content["steps"]["done"] for content in found.values()} == {3, 4}
        assert all(content["steps"]["done"] == content["global_step"] for content in found.values())
        written[name] = {file: content["global_step"] for file, content in found.items()}
    assert written["thread"] == written["once"] and len(written["once"]) == 2
    slow.may = None  # type: ignore[assignment]  # no test's business
    pickle.dumps(io)  # as it goes to workers of a later fit


def test_what_cannot_be_copied_is_said(tmp_path: Path) -> None:
    io = ours.plugins.AsyncCheckpointIO()
    with pytest.raises(CheckpointError, match=r"a.ckpt was not saved: what it holds cannot be copied .*at once"):
        io.save_checkpoint({"lock": threading.Lock()}, tmp_path / "a.ckpt")


@pytest.mark.parametrize("devices", [1, 2])
def test_old_files_are_deleted_after_they_were_written(devices: int, tmp_path: Path) -> None:
    several = {"devices": 2, "strategy": "ddp"} if devices == 2 else {}
    trainer = trained(ours, tmp_path, 4, ours.plugins.AsyncCheckpointIO(), **several)
    assert [file.name for file in tmp_path.iterdir()] == ["epoch=3.ckpt"]
    assert trainer.checkpoint_callback.best_model_path == str(tmp_path / "epoch=3.ckpt")
    assert trained(ours, tmp_path, 5, None, ckpt_path=tmp_path / "epoch=3.ckpt", **several).current_epoch == 5


class Full(ours.plugins.TorchCheckpointIO):
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        raise CheckpointError(f"no room for {Path(path).name}")


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("epochs", [1, 5])
def test_what_the_thread_could_not_write_ends_the_run(devices: int, epochs: int, tmp_path: Path) -> None:
    """At the next save, or at the end where there is none."""
    several = {"devices": 2, "strategy": "ddp"} if devices == 2 else {}
    begun = time.monotonic()
    with pytest.raises(CheckpointError if devices == 1 else WorkerError, match="no room for epoch=0"):
        trained(ours, tmp_path, epochs, ours.plugins.AsyncCheckpointIO(Full()), **several)
    assert time.monotonic() - begun < 30 and threading.active_count() == 1


def test_given_with_a_strategy_and_given_twice() -> None:
    io = ours.plugins.AsyncCheckpointIO()
    strategy = ours.strategies.DDPStrategy(checkpoint_io=io)
    assert ours.Trainer(**{**SETTINGS, "devices": 2}, strategy=strategy).checkpoint_io is io
    for options in ({"plugins": [io, Slow()]}, {"plugins": io, "strategy": strategy}):
        with pytest.raises(ConfigurationError, match="more than one CheckpointIO"):
            ours.Trainer(**{**SETTINGS, "devices": 2}, **options)
    trainer = ours.Trainer(**{**SETTINGS, "fast_dev_run": True}, plugins=[io])
    trainer.fit(ours.demos.BoringModel())
    assert trainer.strategy.checkpoint_io is io
    assert type(ours.Trainer(**SETTINGS).checkpoint_io) is ours.plugins.TorchCheckpointIO
