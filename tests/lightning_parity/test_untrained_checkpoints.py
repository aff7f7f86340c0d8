"""What ``save_checkpoint`` writes of a module that was not trained, and going on from it in either library."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as theirs
import pytest
import torch

import drivetrain.lightning as ours
from tests.lightning_parts.both import classifier, loader, trainer, weights


def parts(content: Any) -> Any:
    """Keys and plain values, without drivetrain's own key, the version, and what was counted in an evaluation."""
    if isinstance(content, dict):
        left = {"drivetrain", "pytorch-lightning_version", "batch_progress", "dirpath"}
        return {name: parts(value) for name, value in content.items() if name not in left}
    return tuple(content.shape) if isinstance(content, torch.Tensor) else content


def saved(L: Any, folder: Path, stage: str, weights_only: bool = False) -> Path:
    class Counting(L.Callback):  # type: ignore[misc, name-defined]
        def state_dict(self) -> dict[str, Any]:
            return {"count": 3}

    class Data(L.LightningDataModule):  # type: ignore[misc, name-defined]
        def val_dataloader(self) -> Any:
            return loader(8)

        def state_dict(self) -> dict[str, Any]:
            return {"place": 5}

    module = classifier(L)
    module.save_hyperparameters({"size": 2})
    stopping = L.callbacks.EarlyStopping("val")
    at_hand = trainer(L, folder, callbacks=[Counting(), stopping])
    if stage == "connect":
        at_hand.strategy.connect(module)
    elif stage == "predict":
        at_hand.predict(module, loader(8))
    else:
        at_hand.validate(module, datamodule=Data(), verbose=False)
    path = folder / f"{L.__name__}.ckpt"
    at_hand.save_checkpoint(path, weights_only=weights_only)
    return path


@pytest.mark.parametrize("stage", ["connect", "validate", "predict"])
@pytest.mark.parametrize("weights_only", [False, True])
def test_the_same_parts_of_a_module_that_was_not_trained(tmp_path: Path, stage: str, weights_only: bool) -> None:
    there, here = (
        torch.load(saved(L, tmp_path, stage, weights_only), map_location="cpu", weights_only=True)
        for L in (theirs, ours)
    )
    assert parts(here) == parts(there)
    assert ("optimizer_states" in here) is not weights_only


@pytest.mark.parametrize("written_by", [theirs, ours], ids=["lightning", "drivetrain"])
def test_training_begins_from_it(tmp_path: Path, written_by: Any) -> None:
    path = saved(written_by, tmp_path, "connect")
    found = []
    for L in (theirs, ours):
        module = classifier(L)
        with torch.no_grad():
            module.head.weight.zero_()
        at_hand = trainer(L, tmp_path, max_epochs=2)
        at_hand.fit(module, loader(), loader(8), ckpt_path=path)
        found.append((at_hand.global_step, at_hand.current_epoch, weights(module)))
    (steps, epoch, there), (*counted, here) = found
    assert counted == [steps, epoch] and steps == 2 * math.ceil(22 / 4)
    assert all(torch.equal(there[name], here[name]) for name in there)


def test_nothing_is_told_of_states_that_no_fit_left(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    module = classifier(ours)
    at_hand = trainer(ours, tmp_path, strategy="ddp", devices=2)
    at_hand.validate(module, loader(8), verbose=False)
    at_hand.save_checkpoint(tmp_path / "at.ckpt")
    assert not [one for one in recwarn if "states of optimizers" in str(one.message)]
    assert torch.load(tmp_path / "at.ckpt", weights_only=True)["optimizer_states"] == []
