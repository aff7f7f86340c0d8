"""States in a checkpoint of callbacks that the Trainer does not have are told of by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import drivetrain
import drivetrain.lightning
from drivetrain import Callback
from tests.runs import QUIET, Classifier, loader


class Counter(Callback):
    def __init__(self, name: str) -> None:
        self.name, self.seen = name, 0

    @property
    def state_key(self) -> str:
        return f"Counter of {self.name}"

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


@pytest.mark.parametrize("library", [drivetrain, drivetrain.lightning])
def test_they_are_named(library: Any, tmp_path: Path) -> None:
    def trainer(epochs: int, *names: str) -> Any:
        callbacks = [Counter(name) for name in names]
        return library.Trainer(**QUIET, max_epochs=epochs, precision="64-true", callbacks=callbacks)

    first = trainer(1, "a", "b", "c")
    first.fit(Classifier(), loader())
    first.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.warns(UserWarning, match="does not have: Counter of a; Counter of c: they are left out, give it the"):
        trainer(2, "b").fit(Classifier(), loader(), ckpt_path=tmp_path / "x.ckpt")
    again = trainer(2, "c", "b", "new", "a")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*states of callbacks")
        again.fit(Classifier(), loader(), ckpt_path=tmp_path / "x.ckpt")
        trainer(2).validate(Classifier(), loader(), ckpt_path=tmp_path / "x.ckpt")  # nothing goes on
    assert [callback.seen for callback in again.callbacks] == [14, 14, 7, 14]


class ByClass(Counter):
    def __init__(self) -> None:
        super().__init__("a class")

    @property
    def state_key(self) -> Any:
        return type(self)


class Renamed(ByClass):
    """Has a key of its own, where a file of Lightning's first version has its class."""

    @property
    def state_key(self) -> str:
        return "another"


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("library", [drivetrain, drivetrain.lightning])
def test_a_state_key_may_be_a_class(library: Any, devices: int, tmp_path: Path) -> None:
    def trainer(epochs: int) -> Any:
        options = {"max_epochs": epochs, "precision": "64-true", "callbacks": [ByClass()]}
        return library.Trainer(**{**QUIET, "devices": devices, "strategy": "ddp" if devices > 1 else "auto"}, **options)

    first, again = trainer(1), trainer(2)
    first.fit(Classifier(), loader())
    steps = first.callbacks[0].seen
    assert steps > 0, "also where workers counted"
    first.save_checkpoint(tmp_path / "x.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*states of callbacks")
        again.fit(Classifier(), loader(), ckpt_path=tmp_path / "x.ckpt")  # the file needs no trust
    assert again.callbacks[0].seen == 2 * steps


@pytest.mark.parametrize("kind", [ByClass, Renamed])
def test_a_file_that_lightning_wrote_may_have_a_class_as_state_key(kind: Any, tmp_path: Path) -> None:
    first = drivetrain.lightning.Trainer(**QUIET, max_epochs=1, precision="64-true", callbacks=[ByClass()])
    first.fit(Classifier(), loader())
    first.save_checkpoint(tmp_path / "x.ckpt")
    content = torch.load(tmp_path / "x.ckpt", weights_only=True)
    content["callbacks"] = {kind: content["callbacks"].popitem()[1]}
    del content["drivetrain"]
    torch.save(content, tmp_path / "x.ckpt")
    again = drivetrain.lightning.Trainer(**QUIET, max_epochs=2, precision="64-true", callbacks=[kind()])
    again.fit(Classifier(), loader(), ckpt_path=tmp_path / "x.ckpt", weights_only=False)
    assert again.callbacks[0].seen == 2 * first.callbacks[0].seen
