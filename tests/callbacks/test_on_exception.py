"""A checkpoint after an exception: complete, of the last step, and never a reason to wait."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch

import drivetrain
import drivetrain.lightning as ours
from drivetrain import checkpoint
from drivetrain.checkpoint import layout
from drivetrain.errors import ConfigurationError, WorkerError
from drivetrain_plugins.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from tests.callbacks.test_as_lightning import fit
from tests.patience import SOON
from tests.runs import QUIET, Classifier, loader


class Fault(Exception):
    """What the tests raise."""


def failing(library: Any, step: int, rank: int = 0) -> Any:
    class Failing(library.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == step and trainer.global_rank == rank:
                raise Fault("on purpose")

    return Failing()


def noting(library: Any, steps: list[int]) -> Any:
    class Noting(library.Callback):  # type: ignore[name-defined, misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            steps.append(trainer.global_step)

    return Noting()


def test_one_process_as_lightning(tmp_path: Path) -> None:
    """The file is where Lightning puts it; training goes on from it, and a run that ends in order removes it."""
    for library in (lightning, ours):
        folder = tmp_path / library.__name__
        saver = library.callbacks.OnExceptionCheckpoint(folder)
        with pytest.raises(Fault):
            fit(library, tmp_path, [failing(library, 5), saver])
        assert os.listdir(folder) == ["on_exception.ckpt"]
        assert torch.load(saver.ckpt_path, weights_only=True)["global_step"] == 5
        resumed = fit(library, tmp_path, [saver], resume=saver.ckpt_path, max_epochs=2)
        assert resumed.global_step == 8
        assert os.listdir(folder) == []
        for word in (None, "last"):  # without a word it goes on there, too
            with pytest.raises(Fault):
                fit(library, tmp_path, [failing(library, 5), saver])
            steps: list[int] = []
            assert fit(library, tmp_path, [saver, noting(library, steps)], resume=word, max_epochs=2).global_step == 8
            assert steps == [5]
            assert os.listdir(folder) == []
    with pytest.raises(ConfigurationError, match="give the file a name"):
        OnExceptionCheckpoint(tmp_path, "")


def test_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    """In the midst of an accumulation window: the window is trained anew, nothing is lost and nothing counts twice."""

    class Late(drivetrain.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 1 and batch_idx == 2:
                raise Fault("on purpose")

    def run(*callbacks: Any, resume: Any = None) -> Any:
        settings: dict[str, Any] = {**QUIET, "precision": "64-true", "enable_checkpointing": None, "max_epochs": 2}
        trainer = drivetrain.Trainer(**settings, seed=3, accumulate_grad_batches=2, callbacks=list(callbacks))
        module = Classifier()
        trainer.fit(module, loader(), ckpt_path=resume)
        return module.state_dict()

    expected = run(OnExceptionCheckpoint(tmp_path / "none"))
    saver = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(Fault):
        run(Late(), saver)
    assert checkpoint.load(saver.ckpt_path).meta["global_step"] == 5
    weights = run(OnExceptionCheckpoint(tmp_path / "none"), resume=saver.ckpt_path)
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_of_two(rank: int, tmp_path: Path) -> None:
    """Replicas: whichever rank fails leaves a whole checkpoint, and the job ends at once."""
    saver = ours.callbacks.OnExceptionCheckpoint(tmp_path)
    clock = time.monotonic()
    with pytest.raises(WorkerError, match="on purpose") as caught:
        fit(ours, tmp_path, [failing(ours, 3, rank), saver], strategy="ddp", devices=2)
    assert time.monotonic() - clock < SOON
    assert caught.value.rank == rank
    content = torch.load(saver.ckpt_path, weights_only=True)
    assert content["global_step"] == 3
    assert content[layout.OURS]["world_size"] == 1
    trainer = fit(ours, tmp_path, [saver], resume=saver.ckpt_path, strategy="ddp", devices=2)
    assert trainer.global_step == 6


def test_shards_are_not_waited_for(tmp_path: Path) -> None:
    """No rank has the whole: nothing is saved, a sentence says why, and the job ends at once."""
    saver = ours.callbacks.OnExceptionCheckpoint(tmp_path)
    said = logging.FileHandler(tmp_path / "said")
    logging.getLogger("drivetrain_plugins").addHandler(said)  # the workers are forked with it
    clock = time.monotonic()
    with pytest.raises(WorkerError, match="on purpose"):
        fit(ours, tmp_path, [failing(ours, 1, 1), saver], strategy="fsdp", devices=2)
    logging.getLogger("drivetrain_plugins").removeHandler(said)
    said.close()
    assert time.monotonic() - clock < SOON
    assert not os.path.exists(saver.ckpt_path)
    assert "after Fault on rank 1: no checkpoint was saved" in (tmp_path / "said").read_text()
    assert "no worker has the whole state by itself" in (tmp_path / "said").read_text()


def test_the_first_cause_is_what_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that refuses in the handler does not hide what training failed of."""
    (tmp_path / "file").write_text("")
    with pytest.raises(Fault):
        fit(ours, tmp_path, [failing(ours, 2), ours.callbacks.OnExceptionCheckpoint(tmp_path / "file")])
    assert "after Fault on rank 0: the checkpoint" in caplog.text
    with pytest.raises(Fault):
        fit(ours, tmp_path, [failing(ours, 2), OnExceptionCheckpoint(tmp_path / "file" / "deeper")])


def test_model_checkpoint_too(tmp_path: Path) -> None:
    names = []
    for library in (lightning, ours):
        folder = tmp_path / library.__name__
        saver = library.callbacks.ModelCheckpoint(folder, save_on_exception=True, every_n_epochs=5)
        with pytest.raises(Fault):
            fit(library, tmp_path, [failing(library, 6), saver])
        names.append(os.listdir(folder))
    assert names[0] == names[1] == ["epoch=1-step=6.ckpt"]
