"""An epoch that goes on under another strategy, whose ranks share out its data otherwise, keeps what it had logged."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.pipelining  # before the workers are forked
from torchmetrics.classification import MulticlassAccuracy

from drivetrain import Callback
from drivetrain.callbacks import ModelCheckpoint
from tests.runs import Outcome, difference, loader, train
from tests.strategies.features import PLACES, ZERO, Planned

with mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}):
    import deepspeed  # noqa: F401  # before the workers are forked: it takes seconds

STEP = 9  # of seven an epoch
EACH = {"single": ("single", 1), **PLACES}


class Counting(Planned):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(batch, batch_idx)
        self.log("train/samples", float(len(batch[1])), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("train/highest", batch[0].max(), reduce_fx="max", on_step=False, on_epoch=True)
        return loss


class Measured(Planned):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.accuracy.update(self.net(batch[0]), batch[1])
        self.log("train/accuracy", self.accuracy, on_step=False, on_epoch=True)
        return self.loss(batch)


def run(make: Any, place: str, **more: Any) -> Outcome:
    strategy, devices = EACH[place]
    return train(make, strategy, devices, validation=loader(23, 5, shuffle=False), **more)


def saved(make: Any, place: str, folder: Path, **more: Any) -> Path:
    saving = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=STEP)
    run(make, place, callbacks=[saving], enable_checkpointing=True, **more)
    return folder / f"step={STEP}.ckpt"


PAIRS = [
    ("tensor_parallel", "single"),
    ("tensor_parallel", "shards"),
    ("data x tensor", "tensor_parallel"),
    ("data x tensor", "hierarchical"),
    ("hierarchical", "data x tensor"),
    ("ring", "tensor_parallel"),
    ("ring", "pipeline"),
    ("pipeline", "tensor_parallel"),
    ("pipeline", "ddp"),
    ("fsdp", "server"),
    ("server", "ddp"),
    ("tensor_parallel", "zero 1"),
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_what_an_epoch_had_logged_counts_once(first: str, second: str, tmp_path: Path) -> None:
    precision, bound = ("32-true", 2e-6) if {first, second} & ZERO else ("64-true", 1e-10)
    whole = run(Counting, "single", precision=precision)
    resumed = run(Counting, second, resume=saved(Counting, first, tmp_path, precision=precision), precision=precision)
    assert whole.metrics["train/samples"] == resumed.metrics["train/samples"] == 51
    assert max(difference(whole, resumed).values()) < bound


class Hears(Callback):
    """Writes down what the first rank is warned of."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        warnings.simplefilter("always")
        warnings.showwarning = self.write

    def write(self, message: Any, *rest: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{message}\n")


@pytest.mark.parametrize(
    ("first", "second", "lost"),
    [("ring", "tensor_parallel", True), ("tensor_parallel", "shards", True), ("ring", "shards", False)],
)
def test_what_metric_objects_gathered_is_told_where_it_is_lost(
    first: str, second: str, lost: bool, tmp_path: Path
) -> None:
    whole = run(Measured, "single")
    resumed = run(Measured, second, resume=saved(Measured, first, tmp_path), callbacks=[Hears(tmp_path / "told")])
    told = "(accuracy) is left out, so their values of this epoch are of the rest of it"
    assert (told in (tmp_path / "told").read_text(encoding="utf-8")) is lost
    assert (abs(whole.metrics["train/accuracy"] - resumed.metrics["train/accuracy"]) > 1e-3) is lost


class Earlier(Counting):
    """Whose checkpoints are as those of a version that did not say which ranks had what."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["metrics"]["places"]


@pytest.mark.parametrize("first", ["single", "ddp", "pipeline"])
def test_what_an_epoch_had_logged_is_kept_of_a_checkpoint_that_does_not_say_which_ranks_had_it(
    first: str, tmp_path: Path
) -> None:
    whole = run(Counting, "single")
    resumed = run(Counting, "pipeline", resume=saved(Earlier, first, tmp_path))
    assert resumed.metrics["train/samples"] == 51
    assert max(difference(whole, resumed).values()) < 1e-10
