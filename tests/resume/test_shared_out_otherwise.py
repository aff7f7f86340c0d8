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
import torchmetrics
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

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


class Begun(torchmetrics.Metric):
    """Whose states begin at something."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("hits", torch.full((2,), 5.0), dist_reduce_fx="sum")
        self.add_state("most", torch.full((), 0.5), dist_reduce_fx="max")

    def update(self, x: torch.Tensor) -> None:
        self.hits += x.sum()
        self.most = torch.maximum(self.most, x.max())

    def compute(self) -> torch.Tensor:
        return self.most + self.hits.sum()


class Apart(torchmetrics.Metric):
    """Whose state ranks do not add up."""

    def __init__(self, reduction: Any) -> None:
        super().__init__()
        self.add_state("seen", torch.zeros(()), dist_reduce_fx=reduction)

    def update(self, x: torch.Tensor) -> None:
        self.seen += x.sum()

    def compute(self) -> torch.Tensor:
        return self.seen.sum()


class Measured(Planned):
    """Metrics that are logged, and some that the module looks at itself, in each way of being reduced over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4, average="micro")
        several = [MulticlassAccuracy(4, average="macro"), MulticlassF1Score(4)]
        self.several = torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.MaxMetric()])
        self.scored = torchmetrics.MetricCollection(several)
        self.least, self.all = torchmetrics.MinMetric(), torchmetrics.CatMetric()
        self.auc = MulticlassAUROC(4)
        self.begun, self.rest = Begun(), torchmetrics.MeanMetric()
        for metric in self.children():
            if metric is not self.net:
                metric.set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scores = self.net(batch[0])
        for metric in (self.accuracy, self.scored, self.auc):
            metric.update(scores.detach(), batch[1])
        for metric in (self.several, self.least, self.all, self.begun, self.rest):
            metric.update(batch[0][:, 0])
        for name in ("accuracy", "least", "begun", "auc"):
            self.log(f"train/{name}", getattr(self, name), on_step=False, on_epoch=True)
        self.log_dict({f"train/{name}": one for name, one in self.scored.items()}, on_step=False, on_epoch=True)
        return F.cross_entropy(scores, batch[1])

    def on_train_epoch_end(self) -> None:
        self.log_dict({f"own/{name}": value for name, value in self.several.compute().items()})
        self.log("own/sorted", (self.all.compute().sort().values * torch.arange(51)).sum())
        self.log("own/rest", self.rest.compute())
        for metric in (self.several, self.all, self.rest):
            metric.reset()


class MeasuredApart(Planned):
    def __init__(self) -> None:
        super().__init__()
        self.apart, self.accuracy = Apart(None), MulticlassAccuracy(4, average="micro")
        self.means, self.own = Apart("mean"), Apart(torch.sum)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scores = self.net(batch[0])
        for metric in (self.apart, self.means, self.own):
            metric.update(batch[0])
        self.accuracy.update(scores, batch[1])
        self.log("train/apart", self.apart, on_step=False, on_epoch=True)
        self.log("train/accuracy", self.accuracy, on_step=False, on_epoch=True)
        return F.cross_entropy(scores, batch[1])


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
    ("first", "second"),
    [
        ("single", "ring"),
        ("ring", "single"),
        ("tensor_parallel", "shards"),
        ("hierarchical", "data x tensor"),
        ("ring", "pipeline"),
        ("pipeline", "ddp"),
        ("server", "ddp"),
        ("tensor_parallel", "zero 1"),
    ],
)
def test_what_metric_objects_gathered_counts_once(first: str, second: str, tmp_path: Path) -> None:
    precision, bound = ("32-true", 5e-5) if {first, second} & ZERO else ("64-true", 1e-10)
    more = {"precision": precision, "max_epochs": 3}
    whole = run(Measured, second, **more)
    told = Hears(tmp_path / "told")
    resume = saved(Measured, first, tmp_path, **more)
    resumed = run(Measured, second, resume=resume, callbacks=[told], **more)
    assert {"train/MulticlassF1Score", "train/begun", "own/MeanMetric", "own/sorted"} <= whole.metrics.keys()
    assert max(difference(whole, resumed).values()) < bound
    assert not told.path.exists() or "is left out" not in told.path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("first", "second", "lost"),
    [("ring", "tensor_parallel", True), ("tensor_parallel", "shards", True), ("ring", "shards", False)],
)
def test_what_metric_objects_gathered_is_told_where_it_is_lost(
    first: str, second: str, lost: bool, tmp_path: Path
) -> None:
    make = MeasuredApart
    whole = run(make, "single")
    resumed = run(make, second, resume=saved(make, first, tmp_path), callbacks=[Hears(tmp_path / "told")])
    told = "(apart, means, own) is left out, so their values of this epoch are of the rest of it"
    assert (told in (tmp_path / "told").read_text(encoding="utf-8")) is lost
    assert (abs(whole.metrics["train/apart"] - resumed.metrics["train/apart"]) > 1e-3) is lost
    assert abs(whole.metrics["train/accuracy"] - resumed.metrics["train/accuracy"]) < 1e-10


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
