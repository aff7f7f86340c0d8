"""What projects make of evaluation steps beside logging: outputs that hooks are given, lists and counts on the module.

Held to the run on one process: also on ranks of a pipeline that have no part of the network's end.
"""

from __future__ import annotations

import logging
import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.pipelining  # before the workers are forked
import torchmetrics
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain import Trainer
from drivetrain.callbacks import BasePredictionWriter, LambdaCallback
from drivetrain_plugins.strategies.kept_on_module import KeptOnModule
from drivetrain_plugins.strategies.pipeline_answers import Answers
from tests.runs import QUIET, Classifier, difference, loader, train

PLACES: list[tuple[Any, int]] = [
    ("pipeline", 2),
    ({"name": "pipeline", "schedule": "interleaved_1f1b"}, 2),
    ("pipeline", 4),
    ({"name": "mesh", "data": 2, "pipeline": 2}, 4),
]


class Meter:
    def __init__(self) -> None:
        self.total, self.samples = 0.0, 0

    def update(self, value: float, samples: int) -> None:
        self.total, self.samples = self.total + value * samples, self.samples + samples


class Keeps(Classifier):
    """As Lightning's guides say: gathers in the steps, looks at it where the epoch ends. ``seen``: the means."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []
        self.labels: list[torch.Tensor] = []
        self.batches = 0
        self.total = torch.zeros(())  # in place
        self.meter = Meter()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(4, average="micro")
        self.seen: list[list[float]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.labels.append(y)  # before the network is called
        self.batches += 1
        scores = self.net(x)
        loss = nn.functional.cross_entropy(scores, y)
        self.outputs.append(scores.detach())
        self.total += len(y)
        self.meter.update(float(loss), len(y))
        self.accuracy(scores, y)
        self.log("val/loss", loss)
        self.log("val/samples", float(len(y)), reduce_fx="sum")
        self.log("val/accuracy", self.accuracy, on_step=False, on_epoch=True)
        return {"loss": loss, "hits": scores.argmax(1) == y}

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        scores, labels = torch.cat(self.outputs), torch.cat(self.labels)
        whole = nn.functional.cross_entropy(scores, labels)
        assert len(labels) == self.total == self.meter.samples
        mean = self.meter.total / self.meter.samples
        self.seen.append([float(whole), mean, self.batches, len(labels)])
        self.log("val/whole", whole)
        self.log("val/total", self.total, reduce_fx="sum")
        self.outputs.clear()
        self.labels.clear()
        self.total.zero_()
        self.meter = Meter()

    on_test_epoch_end = on_validation_epoch_end


class Shown(Classifier):
    """Looks at what its steps return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self.net(batch[0])
        return {"scores": scores, "loss": nn.functional.cross_entropy(scores, batch[1]), "name": f"batch {batch_idx}"}

    test_step = validation_step

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["name"] == f"batch {batch_idx}"
        hits = (outputs["scores"].argmax(1) == batch[1]).sum()
        self.seen.append([float(outputs["loss"]), int(hits)])
        self.log("val/loss", outputs["loss"])
        self.log("val/hits", hits.double(), reduce_fx="sum")

    on_test_batch_end = on_validation_batch_end


def alike(one: Any, several: Any) -> None:
    assert max(difference(one, several).values()) < 1e-10
    assert torch.allclose(torch.tensor(one.module.seen), torch.tensor(several.module.seen), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("strategy", "devices"), PLACES[:3])
@pytest.mark.parametrize("make", [Keeps, Shown])
def test_what_steps_keep_and_return_is_on_every_rank(make: Any, strategy: Any, devices: int) -> None:
    data: dict[str, Any] = {"validation": loader(23, 5, False), "max_epochs": 2}
    one, several = train(make, **data), train(make, strategy, devices, **data)
    assert len(one.module.seen) == len(several.module.seen) > 1
    alike(one, several)


def test_each_pipeline_of_several_has_what_its_own_samples_give() -> None:
    data: dict[str, Any] = {"validation": loader(23, 5, False), "max_epochs": 2}
    one, several = train(Keeps, **data), train(Keeps, *PLACES[3], **data)
    for name in ("val/loss", "val/samples", "val/total", "val/accuracy"):
        assert several.metrics[name] == pytest.approx(one.metrics[name], abs=1e-10), name
    assert [shown[3] for shown in several.module.seen] == [14, 14]  # of batches of 5, 5, 5, 5 and 3 the larger halves


def test_stages_by_themselves(tmp_path: Path) -> None:
    results = []
    for place in ({"strategy": "single", "devices": 1}, {"strategy": "pipeline", "devices": 3}):
        for make in (Keeps, Shown):
            module = make()
            trainer = Trainer(precision="64-true", **place, **QUIET)
            (found,) = trainer.test(module, loader(23, 5, False), verbose=False)
            results.append((found, module.seen))
    for (found, seen), (others, theirs) in zip(results[:2], results[2:], strict=True):
        assert found and found == pytest.approx(others, abs=1e-10)
        assert torch.allclose(torch.tensor(seen), torch.tensor(theirs), rtol=0, atol=1e-10)


class Writes(BasePredictionWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__("batch")
        self.folder = folder

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *place: Any) -> None:
        torch.save((prediction, indices), self.folder / f"{trainer.global_rank}-{place[1]}.pt")


def test_predictions_are_shown_on_every_rank_and_written_once(tmp_path: Path) -> None:
    def keep(trainer: Any, module: Any, outputs: torch.Tensor, batch: Any, batch_idx: int, loader_idx: int = 0) -> None:
        torch.save(outputs, tmp_path / f"seen-{trainer.global_rank}-{batch_idx}.pt")

    (tmp_path / "written").mkdir()
    own = [LambdaCallback(on_predict_batch_end=keep), Writes(tmp_path / "written")]
    trainer = Trainer(strategy="pipeline", devices=3, precision="64-true", callbacks=own, **QUIET)
    predictions = trainer.predict(Classifier(), loader(23, 5, False))
    assert predictions is not None and len(predictions) == 5
    for number, wanted in enumerate(predictions):
        for rank in range(3):
            assert torch.equal(torch.load(tmp_path / f"seen-{rank}-{number}.pt"), wanted)
        assert torch.equal(torch.load(tmp_path / "written" / f"2-{number}.pt")[0], wanted)
    assert len(list((tmp_path / "written").iterdir())) == 5


class Hooks(Classifier):
    """Logs in hooks, which every rank calls, and on the first rank alone."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("batches", 1.0, reduce_fx="sum", on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("epochs", 1.0, reduce_fx="sum")
        if self.trainer.is_global_zero:
            self.log("first", 3.0, reduce_fx="sum")

    def on_validation_batch_end(self, *args: Any) -> None:
        self.log("val/batches", 1.0, reduce_fx="sum")

    def on_validation_epoch_end(self) -> None:
        self.log("val/epochs", 1.0, reduce_fx="sum")


def test_what_ranks_of_a_pipeline_log_in_hooks_counts_once() -> None:
    data: dict[str, Any] = {"validation": loader(23, 5, False)}
    one, several, side_by_side = (train(Hooks, *place, **data) for place in (("single", 1), PLACES[2], PLACES[3]))
    counts = {"batches": 7, "epochs": 1, "first": 3, "val/batches": 5, "val/epochs": 1}
    assert {name: one.metrics[name] for name in counts} == counts
    assert max(difference(one, several).values()) < 1e-10
    both = {name: number * (1 if name == "first" else 2) for name, number in counts.items()}
    assert {name: side_by_side.metrics[name] for name in counts} == both


class KeepsLosses(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss))
        return loss


class KeepsLater(Keeps):
    """Nothing in the check before training, nor of batches but the last where ``late``."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.late = late

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self.net(batch[0])
        if not self.trainer.sanity_checking and (batch_idx == 4 or not self.late):
            self.seen.append([float(nn.functional.cross_entropy(scores, batch[1])), *[0.0] * 3])

    def on_validation_epoch_end(self) -> None:
        pass


def test_what_is_kept_after_the_check_before_training_is_on_every_rank() -> None:
    data: dict[str, Any] = {"validation": loader(23, 5, False), "max_epochs": 1, "num_sanity_val_steps": 2}
    one, several = train(KeepsLater, **data), train(KeepsLater, "pipeline", 2, **data)
    assert len(one.module.seen) == len(several.module.seen) == 5
    alike(one, several)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", r"an evaluation step of")
        with pytest.raises(Exception, match=r"KeepsLater keeps something on the module \(seen\), but"):
            train(lambda: KeepsLater(late=True), "pipeline", 2, **data)


def test_a_training_step_that_keeps_something_is_told_of() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", r".*keeps what it computes on the module")
        train(Classifier, "pipeline", 2)
        train(KeepsLosses)
        with pytest.raises(Exception, match=r"KeepsLosses.training_step keeps .* \(losses\): under a pipeline"):
            train(KeepsLosses, "pipeline", 2)


def test_what_is_kept_is_found_and_put_back() -> None:
    module = Keeps()
    module.names, module.found, module.best = {"a": 1}, {2}, None  # type: ignore[assignment]
    untouched = KeptOnModule(module)
    assert untouched.changed() == []
    module.outputs.append(torch.ones(2))
    module.names["b"] = 2
    module.found.add(3)
    module.best = 0.5
    module.total += 2
    module.meter.update(1.0, 2)
    module.another = "x"
    kept = ["outputs", "total", "names", "found", "best", "another", "total", "samples"]
    assert untouched.changed() == kept
    list_of_outputs = module.outputs
    untouched.restore()
    assert untouched.changed() == [] and module.outputs is list_of_outputs
    assert (module.names, module.found, module.best, module.total.item()) == ({"a": 1}, {2}, None, 0.0)
    assert not hasattr(module, "another") and module.meter.samples == 0


class Counts:
    __slots__ = ("found", "number")

    def __init__(self) -> None:
        self.number, self.found = 0, list[int]()

    def add(self) -> None:
        self.number += 1
        self.found.append(self.number)


def shown(kept: Any) -> str:
    """What is in ``kept``, in words."""
    kept = kept["a"] if isinstance(kept, dict) and "a" in kept else kept
    if isinstance(kept, random.Random):
        return repr(kept.getstate())
    return f"{kept.number} {kept.found}" if isinstance(kept, Counts) else repr(kept)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: np.zeros((2, 2)), lambda kept: kept.__setitem__((0, 1), 1.0)),
        (lambda: [[], []], lambda kept: kept[1].append(1.0)),
        (lambda: {"loss": [], "y": [1.0]}, lambda kept: kept["y"].append(2.0)),
        (lambda: {"val": {0: []}}, lambda kept: kept["val"][0].append(1.0)),
        (lambda: [torch.zeros(2)], lambda kept: kept[0].add_(1.0)),
        (lambda: ([], torch.zeros(2)), lambda kept: kept[1].add_(1.0)),
        (lambda: [[] for _ in range(100)], lambda kept: kept[99].append(1.0)),
        (bytearray, lambda kept: kept.extend(b"1")),
        (lambda: {"a": Counts()}, lambda kept: kept["a"].add()),
        (lambda: random.Random(1), lambda kept: kept.random()),
    ],
    ids=[
        *("an array", "lists in a list", "lists by name", "lists by name and number", "tensors in a list"),
        *("tensors in a tuple", "a list for each class", "bytes", "objects by name", "a generator"),
    ],
)
def test_what_is_kept_further_within_is_found_and_put_back(make: Any, change: Any) -> None:
    module = Keeps()
    module.kept = make()
    untouched = KeptOnModule(module)
    assert untouched.changed() == []
    change(module.kept)
    assert untouched.changed() == ["kept"]
    untouched.restore()
    assert untouched.changed() == [] and shown(module.kept) == shown(make())


@dataclass(frozen=True)
class Settings:
    rate: float = 0.1


class Counting(nn.Module):
    """A criterion that counts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


def test_what_the_projects_own_objects_keep_is_found_and_put_back() -> None:
    module = Keeps()
    module.counts, module.settings, module.criterion = Counts(), Settings(), Counting()
    module.weights = torch.tensor([float("nan"), 1.0])
    module.graph = torch.eye(2).to_sparse()  # of a layout that torch does not compare
    module.leaf = torch.zeros(2, requires_grad=True)
    module.console = logging.getLogger("a step's")  # notes for itself what it has to say
    untouched = KeptOnModule(module)
    module.console.isEnabledFor(logging.DEBUG)
    module.shape = module.weights.shape
    assert untouched.changed() == ["shape"]
    module.counts.add()
    object.__setattr__(module.settings, "note", "x")
    module.criterion.calls += 1
    module.total += 0  # a sum that has nothing yet
    module.leaf.data.add_(1)
    assert untouched.changed() == ["total", "leaf", "shape", "found", "number", "note", "calls"]
    untouched.restore()
    assert untouched.changed() == [] and shown(module.counts) == shown(Counts())
    assert vars(module.settings) == {"rate": 0.1} and module.criterion.calls == 0
    assert module.leaf.tolist() == [0.0, 0.0] and not hasattr(module, "shape")


class CountOperations(TorchDispatchMode):
    """Notes what torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_later_batches_cost_no_copy_of_a_tensor_and_no_wait() -> None:
    module, output = Classifier(), torch.ones(1)
    module.table, module.seen = torch.ones(3), [torch.ones(2)]
    line: Any = SimpleNamespace(world_size=2, device=torch.device("cpu"))
    answers = Answers(line, torch.device("cpu"), False)
    answers.everywhere = False  # as after a loader's first batch, of which nothing was kept
    with CountOperations() as ran:
        answers.of(output, module, lambda output: output)
        assert ran.names == []
        with pytest.warns(UserWarning, match=r"keeps something on the module \(table, seen\)"):
            answers.of(output, module, lambda output: (module.table.add_(1), module.seen[0].add_(1)))
        assert ran.names == ["add_", "add_"]
