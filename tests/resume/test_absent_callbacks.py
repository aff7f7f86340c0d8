"""States in a checkpoint of callbacks that the Trainer does not have are told of by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

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
