"""``self.log``: names, reductions over batches and ranks, weights, destinations, torchmetrics, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger as TheirLogger
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

import drivetrain
from drivetrain.errors import TrainingError
from drivetrain.logger import Logger
from tests.runs import Classifier, dataset, loader, train
from tests.trainer.twins import Body, both, run


class Memory(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class TheirMemory(TheirLogger):
    name = "memory"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


def _logs(step: Callable[[Any, Any, int], None], where: str = "training_step") -> type[Classifier]:
    """A module that calls ``step(module, batch, batch_idx)`` in ``where``."""

    def method(self: Any, batch: Any, batch_idx: int) -> Any:
        step(self, batch, batch_idx)
        return self.loss(batch) if where == "training_step" else None

    return type("Logs", (Classifier,), {where: method})


def _logged(step: Callable[[Any, Any, int], None], where: str = "validation_step", **options: Any) -> dict[str, float]:
    """Metrics after one epoch of 7 training batches or over 23 samples in batches of 5."""
    return train(_logs(step, where), validation=loader(23, 5, shuffle=False), **{"max_epochs": 1, **options}).metrics


# -- against Lightning ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("every", "accumulate"), [(1, 1), (3, 1), (2, 2)])
def test_a_logger_gets_lightnings_values_at_lightnings_steps(every: int, accumulate: int) -> None:
    class Logs(Body):
        def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch), on_step=True, on_epoch=True)

    rows = []
    for library, memory in ((lightning, TheirMemory()), (drivetrain, Memory())):
        options = {"log_every_n_steps": every, "accumulate_grad_batches": accumulate, "limit_train_batches": 6}
        run(library, ("fit", "test"), body=Logs, logger=memory, val_check_interval=4, num_sanity_val_steps=2, **options)
        rows.append(memory.rows)
    theirs, ours = rows
    if (every, accumulate) == (1, 1):  # elsewhere Lightning writes a validation batch more often than it has steps
        assert [step for step, _ in ours] == [step for step, _ in theirs]
    assert len(ours) == len(theirs)
    for (step, mine), (other, their) in zip(ours, theirs, strict=True):
        assert step == other
        assert mine.keys() - {"epoch"} == their.keys() - {"epoch"}
        for name in their:
            assert mine[name] == pytest.approx(their[name], rel=1e-6)


@pytest.mark.parametrize(
    ("on_step", "on_epoch"), [(None, None), (True, None), (None, True), (True, True), (False, True)]
)
def test_flags_name_the_metrics_as_lightning_does(on_step: bool | None, on_epoch: bool | None) -> None:
    class Logs(Body):
        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            self.log("a", 1.0 + batch_idx, on_step=on_step, on_epoch=on_epoch, prog_bar=True)
            return self.loss(batch)

        def validation_step(self: Any, batch: Any, batch_idx: int) -> Any:
            self.log("b", 1.0 + batch_idx, on_step=on_step, on_epoch=on_epoch, logger=False)

    a, b = both(body=Logs, num_sanity_val_steps=0)
    for name in ("callback_metrics", "logged_metrics"):
        theirs, ours = getattr(a.trainer, name), getattr(b.trainer, name)
        if on_step is True:  # values of single validation batches: for loggers here, at the end of the pass
            theirs = {key: value for key, value in theirs.items() if not key.startswith("b")}
            ours = {key: value for key, value in ours.items() if not key.startswith("b")}
        assert {key: float(value) for key, value in ours.items()} == pytest.approx(
            {key: float(value) for key, value in theirs.items()}
        )
    assert a.trainer.progress_bar_metrics.keys() == b.trainer.progress_bar_metrics.keys()


# -- reductions and weights -------------------------------------------------------------------------------------
def _reduce(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "gmean":
        return x.abs().log().mean().exp()
    return {"mean": x.mean, "sum": x.sum, "max": x.max, "min": x.min}[name]()


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min", "gmean", torch.mean, torch.sum, torch.max, max])
def test_reductions_over_batches_and_ranks(reduction: Any, devices: int) -> None:
    name = reduction if isinstance(reduction, str) else reduction.__name__

    def step(module: Any, batch: Any, batch_idx: int) -> None:
        x = batch[0][:, 0]
        value = _reduce(name, x)
        module.log("x", value, reduce_fx=reduction)

    x = dataset(23).tensors[0][:, 0]
    expected = _reduce(name, x)
    metrics = _logged(step, strategy="single" if devices == 1 else "ddp", devices=devices)
    assert metrics["x"] == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    "shape",
    [
        lambda x, y: {"x": x, "y": y},
        lambda x, y: [{"pair": (x, y)}, {"name": "text"}],
        lambda x, y: (x, [y, {"deep": {"er": x}}]),
    ],
)
def test_the_batch_size_is_found_in_nested_batches(shape: Callable[[Any, Any], Any]) -> None:
    class Nested(Classifier):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            while not isinstance(batch, torch.Tensor):
                batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
            self.log("x", batch[:, 0].mean())

    listed = [shape(x, y) for x, y in loader(23, 5, shuffle=False)]
    for devices in (1, 2):
        strategy = "single" if devices == 1 else "ddp"
        metrics = train(Nested, strategy, devices, validation=listed, max_epochs=1).metrics
        assert metrics["x"] == pytest.approx(float(dataset(23).tensors[0][:, 0].mean()), rel=1e-12)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_batch_size_that_is_given_is_the_weight(devices: int) -> None:
    """Token means: values weigh by their tokens, here the label plus one."""

    def step(module: Any, batch: Any, batch_idx: int) -> None:
        x, y = batch
        tokens = y + 1
        module.log("x", (x[:, 0] * tokens).sum() / tokens.sum(), batch_size=int(tokens.sum()))

    x, y = dataset(23).tensors
    expected = float((x[:, 0] * (y + 1)).sum() / (y + 1).sum())
    metrics = _logged(step, strategy="single" if devices == 1 else "ddp", devices=devices)
    assert metrics["x"] == pytest.approx(expected, rel=1e-12)


def test_several_loaders_add_their_number() -> None:
    def step(module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        module.log("x", float(dataloader_idx))
        module.log("both", float(dataloader_idx), add_dataloader_idx=False) if dataloader_idx else None
        module.log("forked", 1.0, on_step=True, on_epoch=True)

    kind = type("Several", (Classifier,), {"validation_step": step, "test_step": step})
    outcome = train(kind, validation=[loader(8), loader(10)], max_epochs=1)
    assert {
        "x/dataloader_idx_0": 0.0,
        "x/dataloader_idx_1": 1.0,
        "both": 1.0,
        "forked_epoch/dataloader_idx_0": 1.0,
    }.items() <= outcome.metrics.items()
    results = outcome.trainer.test(outcome.module, [loader(8), loader(10)], verbose=False)
    assert len(results) == 2
    assert "x/dataloader_idx_0" in results[0] and "x/dataloader_idx_1" not in results[0]
    named = outcome.trainer.test(outcome.module, {"a": loader(8), "b": loader(10)}, verbose=False)
    assert [result.keys() for result in named] == [result.keys() for result in results]


def test_callbacks_log_in_a_stage_and_keep_no_module() -> None:
    class Notes(drivetrain.Callback):
        def __init__(self) -> None:
            self.log_dict = {"of": "its own"}  # type: ignore[assignment,method-assign]

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.log("of_callback", pl_module.number)

    notes = Notes()
    for number in (1.0, 2.0):  # used again, with another module
        module = type("Numbered", (Classifier,), {"number": number})
        assert train(module, max_epochs=1, callbacks=[notes]).metrics["of_callback"] == number
        assert not any(isinstance(value, torch.nn.Module) for value in vars(notes).values())
    assert notes.log_dict == {"of": "its own"}
    notes.log("of_callback", 3.0)  # no stage: as of a module without a Trainer


def test_where_values_go() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> None:
        module.log("silent", 1.0, logger=False)
        module.log("shown", 2.0, prog_bar=True)
        module.log_dict({"one": 3.0, "two": torch.tensor([4.0])}, on_epoch=True, on_step=False, prog_bar=True)
        module.log("whole", 5)
        module.log("zero", 6.0, rank_zero_only=True)

    memory = Memory()
    outcome = train(_logs(step), max_epochs=1, logger=memory, log_every_n_steps=1)
    trainer = outcome.trainer
    assert {"silent", "shown", "one", "two", "whole", "zero"} <= trainer.callback_metrics.keys()
    assert "silent" not in trainer.logged_metrics and "shown" in trainer.logged_metrics
    assert trainer.progress_bar_metrics == {"shown": 2.0, "one": 3.0, "two": 4.0}
    written = set().union(*(row for _, row in memory.rows))
    assert written == {"shown", "one", "two", "whole", "zero", "epoch"}
    assert all(isinstance(value, torch.Tensor) for value in trainer.callback_metrics.values())


def test_metrics_of_the_sanity_check_are_forgotten() -> None:
    class Asks(Classifier):
        def on_train_start(self) -> None:
            assert self.trainer.callback_metrics == {} and self.trainer.logged_metrics == {}

    memory = Memory()
    train(Asks, validation=loader(10), num_sanity_val_steps=2, limit_train_batches=0.5, max_epochs=1, logger=memory)
    assert [step for step, row in memory.rows if "val/loss" in row] == [2]


@pytest.mark.parametrize("devices", [2, 3])
def test_step_values_at_log_boundaries_are_those_of_one_process(devices: int) -> None:
    """A file is written where the workers are; here the ranks' own gathered values are compared at the end."""
    options: dict[str, Any] = {"log_every_n_steps": 3, "max_epochs": 2}
    one, several = train(**options), train(strategy="ddp", devices=devices, **options)
    assert one.metrics["train/loss_step"] == pytest.approx(several.metrics["train/loss_step"], rel=1e-12)
    assert one.metrics["train/loss_epoch"] == pytest.approx(several.metrics["train/loss_epoch"], rel=1e-12)
    for name in ("logged_metrics", "progress_bar_metrics"):
        assert getattr(one.trainer, name).keys() == getattr(several.trainer, name).keys()


def test_names_that_differ_by_rank() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> None:
        rank = module.global_rank
        module.log(f"only_{rank}", 1.0 + rank)
        module.log("all", float(rank))
        if rank == 1 and batch_idx == 0:
            module.log("rare", 7.0, reduce_fx="max")

    metrics = _logged(step, strategy="ddp", devices=2)
    assert metrics["only_0"] == 1.0 and metrics["only_1"] == 2.0 and metrics["rare"] == 7.0
    # 23 samples in batches of 5: rank 0 has 3+3+3+3+2, rank 1 the other 9
    assert metrics["all"] == pytest.approx(9 / 23)


def test_a_rank_without_a_batch_takes_part() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> None:
        module.log("x", batch[0][:, 0].sum(), reduce_fx="sum")

    kind = _logs(step, "validation_step")
    outcome = train(kind, "ddp", 3, validation=loader(2, 1, shuffle=False), max_epochs=1)
    assert outcome.metrics["x"] == pytest.approx(float(dataset(2).tensors[0][:, 0].sum()), rel=1e-12)


# -- torchmetrics -----------------------------------------------------------------------------------------------
class Measured(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.train_loss = MeanMetric()
        self.several = MetricCollection(
            [MulticlassF1Score(4, average="macro"), MulticlassAccuracy(4, average="macro")], prefix="val/"
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.train_loss(loss.detach(), weight=len(batch[0]))
        self.log("mean", self.train_loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self.net(x)
        self.accuracy.update(scores, y)
        self.several.update(scores, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True, prog_bar=True)
        self.log_dict(self.several)

    test_step = validation_step


@pytest.mark.parametrize("samples", [23, 1])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_torchmetrics_over_all_ranks(devices: int, samples: int) -> None:
    strategy = "single" if devices == 1 else "ddp"
    outcome = train(Measured, strategy, devices, validation=loader(samples, 5, shuffle=False), num_sanity_val_steps=1)
    module: Any = outcome.module
    x, y = dataset(samples).tensors
    with torch.no_grad():
        scores = module.net(x)
    hits = float((scores.argmax(1) == y).double().mean())
    assert outcome.metrics["accuracy"] == pytest.approx(hits, rel=1e-6)
    f1 = MulticlassF1Score(4, average="macro")(scores, y)
    assert outcome.metrics["val/MulticlassF1Score"] == pytest.approx(float(f1), rel=1e-6)
    assert outcome.metrics["val/MulticlassAccuracy"] >= 0
    assert outcome.trainer.progress_bar_metrics["accuracy"] == pytest.approx(hits, rel=1e-6)
    epoch = [loss for step, loss in outcome.curve if step > 7]
    sizes = [8] * 6 + [3]
    expected = sum(loss * size for loss, size in zip(epoch, sizes, strict=True)) / 51
    assert outcome.metrics["mean_epoch"] == pytest.approx(expected, rel=1e-6)
    assert "mean_step" in outcome.trainer.callback_metrics or outcome.trainer.log_every_n_steps > 14
    tested = outcome.trainer.test(module, loader(samples, 5, shuffle=False), verbose=False)[0]
    assert tested["accuracy"] == pytest.approx(hits, rel=1e-6)


def test_torchmetrics_start_anew_each_epoch() -> None:
    class Counts(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.mean(float(self.current_epoch))
            self.log("epoch", self.mean)

    assert train(Counts, validation=loader(10), max_epochs=3).metrics["epoch"] == 2.0


def test_torchmetrics_that_cannot_be_logged() -> None:
    def loose(module: Any, batch: Any, batch_idx: int) -> None:
        metric = MeanMetric()
        metric(1.0)
        module.log("x", metric)

    with pytest.raises(TrainingError, match="a metric that is no part of the module"):
        _logged(loose)

    class OnStep(Measured):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.train_loss.update(1.0)
            self.log("x", self.train_loss, on_step=True)
            return self.loss(batch)

    with pytest.raises(TrainingError, match="a metric that was not called on a batch"):
        train(OnStep, max_epochs=1)

    class NotScalar(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = MulticlassConfusionMatrix(4)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.matrix.update(self.net(batch[0]), batch[1])
            self.log("matrix", self.matrix)

    with pytest.raises(TrainingError, match=r"'matrix'.*shape"):
        train(NotScalar, max_epochs=1, validation=loader(10))


# -- refused ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda m, b, i: m.log("x", torch.ones(2)), r"takes a scalar, this tensor has shape \(2,\)"),
        (lambda m, b, i: m.log("x", "text"), "takes a number or a one-element tensor, not str"),
        (lambda m, b, i: m.log("x", {"a": 1}), "takes a number or a one-element tensor, not dict"),
        (lambda m, b, i: m.log("x", 1.0, reduce_fx="median"), "reduce_fx='median'"),
        (lambda m, b, i: m.log("x", 1.0, prog_bar=bool(i)), "with other options than before"),
        (lambda m, b, i: m.log("x", 1.0, on_step=False, on_epoch=False), "would go nowhere"),
    ],
)
@pytest.mark.parametrize("where", ["training_step", "validation_step"])
def test_what_cannot_be_logged(step: Any, said: str, where: str) -> None:
    with pytest.raises(TrainingError, match=said):
        _logged(step, where)


def test_on_step_in_an_epoch_hook() -> None:
    class Wrong(Classifier):
        def on_train_epoch_end(self) -> None:
            self.log("x", 1.0, on_step=True)

    with pytest.raises(TrainingError, match="belongs to no step"):
        train(Wrong, max_epochs=1)


def test_one_name_with_two_reductions_on_two_ranks() -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> None:
        module.log("x", 1.0, reduce_fx="sum" if module.global_rank else "mean")

    with pytest.raises(Exception, match="different reductions on different ranks"):
        _logged(step, strategy="ddp", devices=2)


def test_a_metric_over_a_batch_without_tensors() -> None:
    """Batches whose size cannot be seen count as one sample each, unless batch_size says more."""

    class Texts(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("plain", float(len(batch)))
            self.log("weighed", float(len(batch)), batch_size=len(batch))

    texts = [["a", "b", "c"], ["d"]]
    metrics = train(Texts, validation=texts, max_epochs=1).metrics
    assert metrics["weighed"] == pytest.approx((9 + 1) / 4)


def test_data_set_of_pairs() -> None:
    """A validation loader whose batches are shorter than the ranks are many."""
    data = DataLoader(TensorDataset(*dataset(5).tensors), batch_size=2)
    one = train(validation=data, max_epochs=1).metrics
    several = train(strategy="ddp", devices=3, validation=data, max_epochs=1).metrics
    assert one == pytest.approx(several, rel=1e-10)
