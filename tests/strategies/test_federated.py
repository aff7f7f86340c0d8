"""Federated learning: exact where it claims it, the same on any number of ranks, resumed between rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from drivetrain import Callback, Trainer, TrainModule, checkpoint
from drivetrain.errors import ConfigurationError
from tests.resume.runs import END, Everything, assert_same, fit, noisy_loader
from tests.runs import QUIET, Classifier, Outcome, dataset, difference, loader, seeded, train

WHOLE = {"batch_size": 51, "max_epochs": 4}


class Plain(Classifier):
    """SGD without momentum: a client that forgets its state loses nothing."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, weight_decay=0.01)


class Normalised(Classifier):
    """BatchNorm, dropout, AdamW."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.net = seeded(
            lambda: nn.Sequential(
                nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4)
            )
        )


def run(strategy: Any, devices: int = 1, make: Any = Plain, batch_size: int = 8, **options: Any) -> Outcome:
    validation = loader(23, 5, shuffle=False)
    return train(make, strategy, devices, data=loader(51, batch_size), validation=validation, **options)


def federated(**options: Any) -> dict[str, Any]:
    return {"name": "federated", **options}


@pytest.mark.parametrize("devices", [1, 2])
def test_one_client_and_one_step_is_single(devices: int) -> None:
    found = difference(run("single", **WHOLE), run(federated(clients=1, local_steps=1), devices, **WHOLE))
    assert max(found.values()) < 1e-10


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_all_clients_with_one_step_are_ddp(partition: str, devices: int) -> None:
    """Four clients of different sizes: 13, 13, 13 and 12 samples, or as Dirichlet draws them."""
    several = run(federated(clients=4, local_steps=1, partition=partition, min_samples=3), devices, **WHOLE)
    assert max(difference(run("ddp", 2, **WHOLE), several).values()) < 1e-10


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"clients": 5, "fraction": 0.6, "local_epochs": 2},
        {"clients": 7, "clients_per_round": 2, "local_steps": 3, "algorithm": "fedprox", "mu": 0.5},
    ],
)
def test_the_number_of_ranks_changes_nothing(options: dict[str, Any], devices: int) -> None:
    """With dropout, BatchNorm, AdamW, clipping and accumulation; with two clients a third rank has none."""
    settings = {"make": Normalised, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 3}
    settings["batch_size"] = 4
    one = run(federated(**options), **settings)
    assert one.steps == 3 and len(one.curve) == 3
    assert max(difference(one, run(federated(**options), devices, **settings)).values()) < 1e-10


def test_a_weak_proximal_term_is_fedavg_and_a_strong_one_holds_clients_back() -> None:
    def moved(**options: Any) -> Outcome:
        return run(federated(clients=3, local_epochs=2, **options), max_epochs=1)

    average = moved()
    assert max(difference(average, moved(algorithm="fedprox", mu=0.0)).values()) == 0.0
    first = Plain().state_dict()

    def distance(outcome: Outcome) -> float:
        return sum(float((value - first[name]).square().sum()) for name, value in outcome.weights.items()) ** 0.5

    assert distance(moved(algorithm="fedprox", mu=3.0)) < 0.8 * distance(average)


def test_the_proximal_term_is_the_gradient_of_half_mu_times_the_squared_distance() -> None:
    """Two local steps of one client, by hand."""
    options = {"clients": 1, "local_steps": 2, "algorithm": "fedprox", "mu": 0.3}
    found = run(federated(**options), max_epochs=1, batch_size=51)
    module = Plain().double()
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = module.configure_optimizers()
    for _ in range(2):
        optimizer.zero_grad()
        x, y = dataset(51).tensors
        distance = sum((p - start[name]).square().sum() for name, p in module.named_parameters())
        (module.loss((x, y)) + 0.15 * distance).backward()
        optimizer.step()
    assert max(float((found.weights[name] - p).abs().max()) for name, p in module.named_parameters()) < 1e-12


@pytest.mark.parametrize("devices", [1, 2])
def test_resumed_between_rounds_to_the_same_bits(devices: int, tmp_path: Path) -> None:
    """From a checkpoint made while validating a round, and from one made at the end of its epoch."""
    options: dict[str, Any] = {
        "strategy": federated(clients=3, clients_per_round=2),
        "devices": devices,
        "val_check_interval": 1.0,
        "max_epochs": 3,
    }
    whole = fit(tmp_path / "whole", "validation", "epoch", **options)
    for name in ("1-validation-0", "2-epoch-1"):
        resumed = fit(tmp_path / name, data=noisy_loader(), resume=whole / f"{name}.ckpt", **options)
        assert_same(whole, resumed, devices, best=False)


def test_goes_on_from_another_strategys_weights_and_says_what_it_sent(tmp_path: Path) -> None:
    fit(tmp_path, "batch", strategy="ddp", devices=2)
    saved = tmp_path / "2-batch-0.ckpt"
    weights = checkpoint.load(saved, rank=0, world_size=1).shared["state_dict"]

    class Looks(Callback):
        def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
            assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())

        def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
            sent = trainer.strategy.traffic()
            size = 2 * 8 * sum(p.numel() for p in module.parameters())  # of the epoch that ddp had begun, and another
            assert sent == {"bytes_sent": size, "bytes_dense": size, "messages": 4}
            (tmp_path / f"looked{trainer.global_rank}").touch()

    options = {**QUIET, "precision": "64-true", "max_epochs": 2, "num_sanity_val_steps": 0, "callbacks": [Looks()]}
    trainer = Trainer(strategy=federated(clients=3), devices=2, **options)
    trainer.fit(Everything(), loader(18, 4), loader(7, 3, shuffle=False), ckpt_path=saved)
    assert all((tmp_path / f"looked{rank}").exists() for rank in range(2))


def test_a_finished_epoch_stays_finished_under_another_kind_of_strategy(tmp_path: Path) -> None:
    """Five batches and three steps of ``single`` are an epoch, and so is one round; a checkpoint is of either."""
    rounds = federated(clients=3)
    options: dict[str, Any] = {"val_check_interval": 1.0, "num_sanity_val_steps": 0}
    fit(tmp_path / "round", "validation", strategy=rounds, max_epochs=1, **options)
    fit(tmp_path / "steps", "batch", strategy="single", max_epochs=1, **options)
    cases: list[tuple[str, Any, int, int]] = [
        ("round/1-validation-0", "single", 1, 1),
        ("round/1-validation-0", "single", 2, 4),
        ("steps/3-batch-0", rounds, 1, 3),
        ("steps/3-batch-0", rounds, 2, 4),
        ("steps/1-batch-0", rounds, 1, 2),  # begun only: the round is made
    ]
    for name, strategy, epochs, steps in cases:
        there = tmp_path / f"{name.replace('/', '-')}-{epochs}"
        fit(there, resume=tmp_path / f"{name}.ckpt", strategy=strategy, max_epochs=epochs, **options)
        ended = checkpoint.load(there / END).shared
        assert (ended["epoch"], ended["global_step"]) == (epochs, steps), name
        before = checkpoint.load(tmp_path / f"{name}.ckpt").shared
        same = all(torch.equal(value, before["state_dict"][key]) for key, value in ended["state_dict"].items())
        assert same == (steps == before["global_step"]), name


class Validations(Callback):
    def __init__(self) -> None:
        self.after: list[int] = []

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.after.append(trainer.global_step)
        assert trainer.estimated_stepping_batches == 5


def test_validation_and_schedules_count_rounds() -> None:
    for options, after in (
        ({}, [1, 2, 3, 4, 5]),
        ({"val_check_interval": 1}, [1, 2, 3, 4, 5]),
        ({"val_check_interval": 2, "check_val_every_n_epoch": None}, [2, 4]),
        ({"check_val_every_n_epoch": 2}, [2, 4]),
    ):
        seen = Validations()
        run(federated(clients=3), max_epochs=5, callbacks=[seen], **options)
        assert seen.after == after
    for interval in (0.5, 3):
        with pytest.raises(ConfigurationError, match=f"within a round.*val_check_interval={interval}"):
            Trainer(strategy=federated(), val_check_interval=interval, **QUIET)


class StopsFirstBatch(Callback):
    """Ends every client's training at its second batch."""

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


def test_a_hook_that_ends_the_epoch_ends_the_client() -> None:
    short = run(federated(clients=3), 2, callbacks=[StopsFirstBatch()])
    steps = run(federated(clients=3, local_steps=1), 2)
    assert short.steps == steps.steps == 2
    assert max(float((short.weights[n] - v).abs().max()) for n, v in steps.weights.items()) == 0.0


class EndsByData(Plain):
    """Some clients end at their second batch, others do not."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 and float(batch[0].sum()) > 0 else None


@pytest.mark.parametrize("devices", [2, 3])
def test_a_client_ends_by_itself_whatever_those_of_other_ranks_do(devices: int) -> None:
    strategy, options = federated(clients=5, batch_size=3), {"make": EndsByData, "max_epochs": 3}
    assert max(difference(run(strategy, **options), run(strategy, devices, **options)).values()) < 1e-12


@pytest.mark.parametrize(("limit", "read"), [(7, 7), (20, 13), (0.5, 6), (1.0, 13), (0.15, 1)])
def test_a_limit_of_batches_is_of_each_clients_own(limit: int | float, read: int) -> None:
    """Four clients of 13 batches of one sample each, where the loader has 7 batches of 8."""

    class Counts(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("batches", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
            return super().training_step(batch, batch_idx)

    options = {"data": loader(52), "max_epochs": 1, "limit_train_batches": limit}
    run = train(Counts, federated(clients=4, batch_size=1), 2, **options)
    assert run.metrics["batches"] == 4 * read


def test_loader_workers_read_the_clients_data() -> None:
    data = DataLoader(dataset(51), batch_size=8, shuffle=True, num_workers=2)
    there = train(Plain, federated(clients=3), 2, data=data)
    assert max(difference(train(Plain, federated(clients=3), data=loader(51)), there).values()) < 1e-12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clients": 3, "clients_per_round": 4}, "more than the 3 clients"),
        ({"clients": 0}, "clients=0"),
        ({"fraction": 0.0}, "fraction=0.0"),
        ({"fraction": 1.5}, r"^strategy.fraction=1.5: give a part above 0 and up to 1 of the clients\.$"),
        ({"local_steps": 0}, "local_steps=0"),
        ({"algorithm": "fedsgd"}, "fedavg, fedprox"),
        ({"partition": "label"}, "iid, dirichlet"),
        ({"mu": -1.0}, "mu=-1.0"),
        ({"alpha": 0.0}, "alpha=0.0"),
    ],
)
def test_options_out_of_range_are_refused_before_launch(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        run(federated(**options), 2)


def test_data_that_cannot_be_divided_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match="51 samples cannot be divided among 60 clients"):
        run(federated(clients=60), 2)
    drawn = DataLoader(dataset(51), batch_size=8, sampler=WeightedRandomSampler([1.0] * 51, 51))
    with pytest.raises(ConfigurationError, match="no sampler of its own"):
        train(Plain, federated(clients=3), 2, data=drawn)


def test_precisions_that_scale_losses_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="16-mixed"):
        run(federated(), precision="16-mixed")
