"""The parameter server in whole runs: exact in every arrangement, asynchronous within a bound, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, which sets a variable and makes a folder
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Trainer, TrainModule, checkpoint
from drivetrain.errors import ConfigurationError
from tests.resume.runs import END, Everything, fit
from tests.runs import QUIET, Classifier, difference, loader, seeded, train
from tests.strategies.gpt import TinyGPT
from tests.strategies.parity import check_parity


def server(**options: Any) -> dict[str, Any]:
    return {"name": "parameter_server", **options}


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({"embedded": True}, 1),
        ({"embedded": True}, 2),
        ({"embedded": True}, 3),
        ({"servers": 2}, 3),
        ({"servers": 2}, 4),
        ({"encrypt": True}, 2),
    ],
    ids=str,
)
def test_exact_in_every_arrangement(options: dict[str, Any], devices: int) -> None:
    check_parity(server(**options), devices, max_steps=12)


def tied() -> TinyGPT:
    return TinyGPT(tied=True)


def test_tied_weights() -> None:
    check_parity(server(servers=2), 4, make=tied, max_steps=8)


@pytest.mark.parametrize("bound", [0.01, None])
def test_clipping_by_value_and_none(bound: float | None) -> None:
    options = {"gradient_clip_val": bound, "gradient_clip_algorithm": "value", "max_steps": 6}
    check_parity(server(servers=2), 4, **options)


class Weighted(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        weights = 1.0 + (y == 0).double()
        losses = nn.functional.cross_entropy(self.net(x), y, reduction="none")
        return {"loss": (losses * weights).sum() / weights.sum(), "weight": weights.sum()}


class Skips(Classifier):
    """No loss in batch 1 on any rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("make", [Weighted, Skips])
def test_odd_losses(make: Any) -> None:
    reference, run = train(make), train(make, server(), 3)
    assert run.steps == reference.steps
    assert difference(reference, run)["weights"] < 1e-10


def test_bytes_are_counted() -> None:
    run = train(Classifier, server(embedded=True), 1, max_epochs=1)
    size = sum(p.numel() * 8 for p in run.module.parameters())
    assert run.trainer.run_summary()["communication"]["bytes_sent"] > 2 * size * run.steps  # gradients and weights


# -- asynchronous -----------------------------------------------------------------------------------------------
class Digits(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).double().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class History(Callback):
    """The accuracy after every epoch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["accuracy"]))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = list(state_dict["seen"])


def accuracy(strategy: Any, devices: int, seed: int) -> float:
    """On the half of the digits that is held out, over the last epochs: single epochs scatter by half a point."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels)
    held_out = torch.arange(len(x)) % 2 == 1
    torch.manual_seed(seed)
    module = Digits()
    history, options = History(), {"max_epochs": 20, "num_sanity_val_steps": 0, "seed": seed, **QUIET}
    trainer = Trainer(strategy=strategy, devices=devices, callbacks=[history], **options)
    data = DataLoader(TensorDataset(x[~held_out], y[~held_out]), 64, shuffle=True)
    trainer.fit(module, data, DataLoader(TensorDataset(x[held_out], y[held_out]), 449))
    return sum(history.seen[-6:]) / 6


def test_async_comes_to_singles_accuracy() -> None:
    seeds = (1, 2, 3)
    single = [accuracy("single", 1, seed) for seed in seeds]
    found = [accuracy(server(mode="async", embedded=True), 2, seed) for seed in seeds]
    assert sum(found) / 3 > sum(single) / 3 - 0.007, (single, found)


@pytest.mark.parametrize("bound", [None, 0, 2])
def test_async_runs_with_and_without_a_bound(bound: int | None) -> None:
    run = train(Classifier, server(mode="async", max_staleness=bound), 4, gradient_clip_val=0.5)
    assert run.steps == train().steps
    assert all(math.isfinite(loss) for _, loss in run.curve)


class Wide(Everything):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.net[0] = seeded(lambda: nn.Linear(6, 64))
        self.net[3] = seeded(lambda: nn.Linear(64, 4), seed=1)


def test_large_tensors_are_spread_over_the_servers(tmp_path: Path) -> None:
    """Both matrices are more than a server is to have. Checkpoints are of whole tensors, and from one a
    run goes on in one process or on other servers, to the same end."""
    options: dict[str, Any] = {"val_check_interval": 1.0, "max_epochs": 2, "data": loader(18, 4)}
    whole = fit(tmp_path / "whole", module=Wide(), **options)
    pieces = fit(tmp_path / "pieces", "validation", module=Wide(), strategy=server(servers=2), devices=3, **options)
    saved = pieces / "3-validation-0.ckpt"
    ways: list[tuple[Any, int]] = [("single", 1), (server(servers=3), 5), (server(servers=2), 3)]
    folders = [pieces]
    for number, (strategy, devices) in enumerate(ways):
        folder = tmp_path / str(number)
        folders.append(fit(folder, module=Wide(), resume=saved, strategy=strategy, devices=devices, **options))
    expected = checkpoint.load(whole / END).shared
    for folder in folders:
        found = checkpoint.load(folder / END).shared
        for name, value in expected["state_dict"].items():
            torch.testing.assert_close(found["state_dict"][name], value, rtol=0, atol=1e-10)
        for name, state in expected["optimizer_states"][0]["state"].items():
            for key, value in state.items():
                torch.testing.assert_close(found["optimizer_states"][0]["state"][name][key], value, rtol=0, atol=1e-10)


# -- refusals ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "devices", "said"),
    [
        ({}, 1, "with 1 server leaves no worker of 1: set devices=2 or more, or strategy.embedded=true"),
        ({"servers": 3}, 3, "with 3 servers leaves no worker of 3"),
        ({"servers": 0}, 2, "at least one server is needed"),
        ({"servers": 2, "embedded": True}, 3, "beside the first worker there is one server"),
        ({"mode": "asynch"}, 2, "strategy.mode=asynch: .*'async'"),
        ({"max_staleness": 1}, 2, "is for mode=async"),
        ({"encrypt": False}, 2, "encrypt=false over 2 nodes"),
    ],
)
def test_refused_before_launch(options: dict[str, Any], devices: int, said: str) -> None:
    nodes = 2 if "nodes" in said else 1
    with pytest.raises(ConfigurationError, match=said):
        Trainer(strategy=server(**options), devices=devices, num_nodes=nodes, **QUIET)


def test_evaluation_alone() -> None:
    module = Classifier().double()
    data = loader(23, 5, False)
    expected = Trainer(strategy="single", precision="64-true", **QUIET).validate(module, data, verbose=False)
    found = Trainer(strategy=server(), devices=3, precision="64-true", **QUIET).validate(module, data, verbose=False)
    assert found[0] == pytest.approx(expected[0], abs=1e-12)


@pytest.mark.parametrize("embedded", [False, True])
def test_predictions_come_once_and_none_of_a_server(embedded: bool) -> None:
    module, data = Classifier().double(), loader(23, 5, False)
    expected = torch.cat(Trainer(strategy="single", precision="64-true", **QUIET).predict(module, data))
    trainer = Trainer(strategy=server(embedded=embedded), devices=3, precision="64-true", **QUIET)
    found = torch.cat(trainer.predict(module, data))
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-12
