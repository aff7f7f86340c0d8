"""Elastic averaging of weights (EASGD) and of gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Callback, Trainer, TrainModule
from drivetrain.errors import ConfigurationError
from tests.resume.runs import assert_same, fit, noisy_loader
from tests.runs import Classifier, Gan, dataset, difference, loader, train
from tests.strategies.parity import check_parity


def elastic(**options: Any) -> dict[str, Any]:
    return {"name": "elastic_averaging", **options}


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_without_an_own_share_it_is_single(devices: int) -> None:
    check_parity(elastic(mix="gradients", local=0.0), devices)


def test_mixed_gradients_keep_their_mean() -> None:
    """SGD: at the first step the mean of the replicas is single's weight; later their gradients are of other places."""
    options = {"max_steps": 1}
    found = difference(train(Classifier, **options), train(Classifier, elastic(mix="gradients"), 3, **options))
    assert max(found.values()) < 1e-12
    later = difference(train(Classifier), train(Classifier, elastic(mix="gradients"), 3))
    assert 1e-9 < later["weights"] < 0.1


class OneClass(Classifier):
    """Learns from the samples of one class alone, without momentum or decay."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        weights = (y == 3).double()
        losses = torch.nn.functional.cross_entropy(self.net(x), y, reduction="none")
        return {"loss": (losses * weights).sum() / weights.sum().clamp(min=1), "weight": weights.sum()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def test_mixed_gradients_of_a_rank_whose_loss_weighs_nothing() -> None:
    """The other's gradient is the global one: that one follows it whole, this one by the share that is not its own."""
    x, y = dataset(8).tensors
    options: dict[str, Any] = {"data": [(x, torch.cat([torch.full((4,), 3), y[4:].clamp(max=2)]))], "max_steps": 1}
    start = OneClass().state_dict()
    alone = train(OneClass, **options).weights
    mixed = train(OneClass, elastic(mix="gradients", local=0.5), 2, **options).weights
    for name, before in start.items():
        assert torch.allclose(mixed[name] - before, (alone[name] - before) * 0.75, rtol=0, atol=1e-12)
    assert max(float((alone[name] - before).abs().max()) for name, before in start.items()) > 1e-3


def test_manual_optimisation_with_mixed_gradients() -> None:
    found = difference(train(Gan), train(Gan, elastic(mix="gradients", local=0.0), 2))
    assert max(found.values()) < 1e-10


class Invariant(Callback):
    """Checks a move of replicas and centre against its equations, on every rank."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.moves = 0

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        strategy: Any = trainer.strategy
        moved = strategy.mix

        def checked() -> None:
            before = self._vectors(trainer)
            moved()
            after = self._vectors(trainer)
            replicas, centre = before
            expected = centre + self.rate * sum(x - centre for x in replicas)
            assert float((after[1] - expected).abs().max()) < 1e-14
            assert float((sum(before[0]) + before[1] - sum(after[0]) - after[1]).abs().max()) < 1e-13
            assert float((replicas[0] - replicas[-1]).abs().max()) > 1e-6
            self.moves += 1

        strategy.mix = checked

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        assert self.moves == 7

    def _vectors(self, trainer: Trainer) -> tuple[list[torch.Tensor], torch.Tensor]:
        strategy: Any = trainer.strategy
        own = torch.cat([p.detach().reshape(-1) for p in strategy.trained().values()])
        centre = torch.cat([strategy.extra()["centre"][name].reshape(-1) for name in strategy.trained()])
        return strategy.communicator.all_gather(own), centre


@pytest.mark.parametrize(("devices", "rate"), [(2, None), (3, 0.2)])
def test_the_sum_of_replicas_and_centre_is_preserved(devices: int, rate: float | None) -> None:
    callback = Invariant(0.9 / devices if rate is None else rate)
    assert train(Classifier, elastic(period=2, moving_rate=rate), devices, callbacks=[callback]).steps == 14


def test_the_centre_is_validated_and_handed_over() -> None:
    data = loader(23, 5, shuffle=False)
    run = train(Classifier, elastic(period=3), 2, validation=data, max_epochs=1)
    again = run.trainer.validate(run.module, data, verbose=False)[0]
    assert abs(again["val/loss"] - run.metrics["val/loss"]) < 1e-12


@pytest.mark.parametrize("options", [{"period": 2}, {"mix": "gradients"}])
def test_resumed_to_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"strategy": elastic(**options), "devices": 2}
    whole = fit(tmp_path / "whole", "batch", **settings)
    resumed = fit(tmp_path / "again", data=noisy_loader(), resume=whole / "3-batch-0.ckpt", **settings)
    assert_same(whole, resumed, 2, best=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mix": "both"}, "weights, gradients"),
        ({"period": 0}, "at least 1"),
        ({"moving_rate": 0.7}, "below 0.667"),
        ({"local": 1.5}, "from 0 to 1"),
    ],
)
def test_options_out_of_range_are_refused_before_launch(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        train(Classifier, elastic(**options), 2)
