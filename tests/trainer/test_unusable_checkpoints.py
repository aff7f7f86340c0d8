"""A checkpoint that cannot be gone on from is refused in the caller's process, before a worker starts."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Callback, Trainer, checkpoint, handover, resumption, session
from drivetrain.errors import CheckpointError, ConfigurationError, UnusableCheckpoint
from tests.runs import QUIET, Classifier, loader, train


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    train(max_epochs=1).trainer.save_checkpoint(folder / "whole")
    return folder / "whole"


def changed_byte(path: Path) -> None:
    content = bytearray((path / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "state.pt").write_bytes(content)


def gone(path: Path) -> None:
    shutil.rmtree(path)


def without_a_file(path: Path) -> None:
    next((path / "weights").glob("*.distcp")).unlink()


def cut_manifest(path: Path) -> None:
    (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes()[:90])


def no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def written(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        shutil.rmtree(path)
        path.write_bytes(content)

    return write


def saved_by_torch(content: Any, cut: int = 0) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        shutil.rmtree(path)
        torch.save(content, path)
        path.write_bytes(path.read_bytes()[: -cut or None])

    return write


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (gone, r"there is no checkpoint"),
    (changed_byte, r"damaged: the content of state\.pt has changed"),
    (without_a_file, r"damaged: weights/\S+ cannot be read"),
    (cut_manifest, r"damaged: manifest\.json cannot be read"),
    (no_manifest, r"is not a checkpoint: it has no manifest\.json"),
    (written(b"hello"), r"is not a checkpoint: torch did not write it"),
    (written(bytes(range(256)) * 8), r"is not a checkpoint: torch did not write it"),
    (written(pickle.dumps({"state_dict": {}})), r"is not a checkpoint: torch did not write it"),
    (saved_by_torch({"state_dict": {}}, cut=60), r"damaged"),
    (saved_by_torch([1]), r"holds a list and no dictionary"),
    (saved_by_torch({"weights": 1}), r"holds no 'state_dict'"),
    (saved_by_torch({"state_dict": {}, "odd": saved_by_torch}), r"which loading must not make unasked"),
]


@pytest.mark.parametrize("devices", [1, 2])
def test_damaged_ones_are_refused_before_anything_starts(
    devices: int, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(session, "run", lambda *a: started.append(1))
    monkeypatch.setattr(handover, "in_workers", lambda *a: started.append(1))
    trainer = Trainer(**QUIET, devices=devices, max_epochs=2, precision="64-true", default_root_dir=tmp_path)
    stages = ["fit", "validate", "test", "predict"]
    for number, (damage, said) in enumerate(DAMAGES):
        path = tmp_path / f"{number} ünïcode"
        shutil.copytree(saved, path)
        damage(path)
        with pytest.raises(UnusableCheckpoint, match=said) as caught:
            getattr(trainer, stages[number % 4])(Classifier(), loader(), ckpt_path=path)
        assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
        assert isinstance(caught.value, CheckpointError) and isinstance(caught.value, ConfigurationError)
    for stage in stages:
        for word in ("last", "best"):
            with pytest.raises(UnusableCheckpoint, match=r"there is no (complete|best) checkpoint"):
                getattr(trainer, stage)(Classifier(), loader(), ckpt_path=word)
    assert not started


class Wider(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


class Narrowed(Wider):
    """Becomes what the checkpoint is of before it is loaded."""

    def setup(self, stage: str) -> None:
        if hasattr(self, "more"):
            del self.more


class Narrows(Callback):
    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        del pl_module.more


def test_one_of_another_model_is_refused_unless_hooks_may_change_that(saved: Path) -> None:
    def trainer(*callbacks: Callback) -> Trainer:
        return Trainer(**QUIET, devices=2, max_epochs=2, precision="64-true", callbacks=list(callbacks))

    for stage in ("fit", "test"):
        with pytest.raises(UnusableCheckpoint, match=r"does not fit Wider: missing \['more.bias', 'more.weight'\]"):
            getattr(trainer(), stage)(Wider(), loader(), ckpt_path=saved)
    trainer().validate(Narrowed(), loader(), ckpt_path=saved, verbose=False)
    trainer(Narrows()).validate(Wider(), loader(), ckpt_path=saved, verbose=False)


def test_its_bytes_are_read_for_their_checksums_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unchecked(Classifier):
        def setup(self, stage: str) -> None:
            monkeypatch.setattr(checkpoint, "resolve", None)  # to look again would fail

    looked: list[Any] = []
    real = checkpoint.resolve
    monkeypatch.setattr(checkpoint, "resolve", lambda *given: looked.append(given) or real(*given))
    trainer = Trainer(**QUIET, devices=2, max_epochs=2, precision="64-true")
    trainer.fit(Unchecked(), loader(), ckpt_path=saved)
    assert len(looked) == 1 and trainer.current_epoch == 2
    assert trainer.ckpt_path == str(saved)
    assert resumption.find(trainer, None) is None
