"""Local SGD and DiLoCo: exact where they claim it, and what they keep elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Callback, Trainer, TrainModule, checkpoint
from drivetrain.errors import ConfigurationError, WorkerError
from drivetrain.sharding import BatchSource
from drivetrain.strategy import Shard
from tests.resume.runs import Everything, assert_same, end, fit, noisy_loader
from tests.runs import Classifier, Gan, difference, loader, seeded, train
from tests.strategies.parity import check_parity


class Momentum(Classifier):
    """SGD with momentum and weight decay: its step is linear in the gradient."""

    def __init__(self) -> None:
        super().__init__("sgd")


class Normalised(Classifier):
    """With BatchNorm, whose statistics differ by rank."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.net = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)))


class Plain(Everything):
    """AdamW alone, without dropout and schedules."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def local(**options: Any) -> dict[str, Any]:
    return {"name": "local_sgd", **options}


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_one_local_step_is_a_step_of_single(devices: int) -> None:
    """AdamW, clipping by norm, accumulation, warm-up, an uneven tail."""
    check_parity(local(period=1), devices)


@pytest.mark.parametrize(("make", "options"), [(Gan, {"gradient_clip_val": 0.5}), (Classifier, {"nonfinite": "skip"})])
def test_manual_optimisation_and_skips_at_one_local_step(
    make: Callable[[], TrainModule], options: dict[str, Any]
) -> None:
    found = difference(train(make, **options), train(make, local(period=1), 3, **options))
    assert max(found.values()) < 1e-10


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_averaging_weights_after_each_step_is_exact_for_sgd(devices: int) -> None:
    """DiLoCo with outer rate 1 and no momentum is plain averaging of weights: 51 samples in batches of 8, tail of 3."""
    options = {"validation": loader(23, 5, shuffle=False)}
    averaged = train(Momentum, local(period=1, outer="nesterov", outer_lr=1.0, outer_momentum=0.0), devices, **options)
    assert max(difference(train(Momentum, **options), averaged).values()) < 1e-10


@pytest.mark.parametrize("period", [2, 5])
def test_diloco_with_a_plain_outer_step_is_local_sgd(period: int) -> None:
    plain = train(Classifier, local(period=period), 3)
    outer = train(Classifier, local(period=period, outer="nesterov", outer_lr=1.0, outer_momentum=0.0), 3)
    assert max(difference(plain, outer).values()) < 1e-12


def test_the_outer_optimizer_follows_its_equations() -> None:
    """Two ranks, two steps a period, SGD on a quadratic whose local steps are known in closed form."""
    rate, samples = 0.1, torch.arange(16, dtype=torch.float64)

    class Quadratic(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return 0.5 * (self.x - batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=rate)

    data = torch.utils.data.DataLoader(samples, batch_size=4)
    run = train(Quadratic, local(period=2, outer="nesterov"), 2, data=data, max_epochs=1)
    anchor = momentum = 0.0
    for period in range(2):
        replicas = [anchor, anchor]
        for step in range(2):
            batch = samples[4 * (2 * period + step) :][:4]
            for rank in range(2):
                replicas[rank] -= rate * (replicas[rank] - float(batch[2 * rank : 2 * rank + 2].mean()))
        gradient = anchor - sum(replicas) / 2
        momentum = 0.9 * momentum + gradient
        anchor -= 0.7 * (gradient + 0.9 * momentum)
    assert abs(float(run.weights["x"]) - anchor) < 1e-12


def test_between_averages_the_mean_is_validated_and_handed_over() -> None:
    """6 steps an epoch and a period of 100: nothing is averaged, yet weights and statistics are the ranks' mean."""
    data = loader(23, 5, shuffle=False)
    options = {"data": loader(48), "validation": data, "max_epochs": 1}
    run = train(Normalised, local(period=100), 2, **options)
    again = run.trainer.validate(run.module, data, verbose=False)[0]
    assert abs(again["val/loss"] - run.metrics["val/loss"]) < 1e-12
    other = train(Normalised, local(period=6), 2, **options)
    assert max(difference(run, other).values()) < 1e-12


class ByHand(Normalised):
    """Makes a step of every other batch, so that an epoch ends in one that only BatchNorm has seen."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    def on_validation_epoch_end(self) -> None:
        for name, value in self.net[1].named_buffers():
            self.log(f"{name}/least", value.double().sum(), reduce_fx="min")
            self.log(f"{name}/most", value.double().sum(), reduce_fx="max")


@pytest.mark.parametrize("strategy", [local(period=2), "gossip", {"name": "elastic_averaging", "period": 2}], ids=str)
def test_what_only_running_statistics_saw_is_averaged_before_validation(strategy: Any) -> None:
    """Validated a step of the optimizer after an average, and again when another batch has gone forward."""
    data = loader(32)
    run = train(ByHand, strategy, 2, data=data, validation=loader(7, 3, shuffle=False), val_check_interval=1)
    for name in ("running_mean", "running_var"):
        assert run.metrics[f"{name}/least"] == run.metrics[f"{name}/most"]


class StepsItself(Gan):
    """With the optimizers as they were configured: Lightning counts no step of theirs."""

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return super().optimizers(use_pl_optimizer=False)


@pytest.mark.parametrize("strategy", [local(period=2), "gossip", "elastic_averaging"], ids=str)
def test_steps_that_nobody_counts_are_refused_where_replicas_would_never_meet(strategy: Any) -> None:
    with pytest.raises(WorkerError, match=r"no step is counted after which strategy=\w+ would bring replicas together"):
        train(StepsItself, strategy, 2)
    train(StepsItself, {"name": "elastic_averaging", "mix": "gradients"}, 2, max_epochs=1)
    train(StepsItself, local(period=1), 2, max_epochs=1)


def test_validating_changes_nothing() -> None:
    options = {"data": loader(48)}
    validated = {"validation": loader(23, 5, shuffle=False), "val_check_interval": 1}
    often = train(Normalised, local(period=4), 3, **options, **validated)
    never = train(Normalised, local(period=4), 3, **options)
    assert often.curve == never.curve
    assert all(torch.equal(often.weights[name], value) for name, value in never.weights.items())


class Traffic(Callback):
    """Logs what each rank sent; the mean is that of the ranks."""

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        for name, value in trainer.strategy.traffic().items():
            module.log(name, float(value))


def test_it_sends_a_message_a_period() -> None:
    """7 steps in an epoch: two averages with a period of 3; each of two ranks sends 2(N-1)/N of the weights in fp64."""
    size = 8 * sum(p.numel() for p in Classifier().parameters())
    sent = train(Classifier, local(period=3), 2, max_epochs=1, callbacks=[Traffic()]).metrics
    assert (sent["bytes_sent"], sent["messages"], sent["bytes_dense"]) == (2 * size, 2 * 2, 7 * size)


@pytest.mark.parametrize("outer", ["average", "nesterov"])
def test_resumed_amid_a_period_to_the_same_bits(outer: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": local(period=3, outer=outer), "devices": 2}
    whole = fit(tmp_path / "whole", "batch", **options)
    for name in ("1-batch-0", "3-batch-0", "4-batch-1"):
        resumed = fit(tmp_path / name, data=noisy_loader(), resume=whole / f"{name}.ckpt", **options)
        assert_same(whole, resumed, 2, best=False)


GOSSIP: dict[str, Any] = {"name": "gossip"}
ANOTHER_WAY = [
    local(period=4, outer="nesterov"),
    {"name": "elastic_averaging", "period": 4},
    {"name": "elastic_averaging", "mix": "gradients"},
]


@pytest.mark.parametrize(
    ("former", "strategy"),
    [*((former, one) for former in (local(period=4), GOSSIP) for one in ANOTHER_WAY), (local(period=4), GOSSIP)],
    ids=str,
)
def test_replicas_that_met_in_another_way_go_on_from_their_mean(former: Any, strategy: Any, tmp_path: Path) -> None:
    """Their own weights and states would be taken for those of this strategy."""
    plain: dict[str, Any] = {"validation": False, "seed": 5, "devices": 2}
    fit(tmp_path, "batch", module=Plain(), data=loader(18, 4), strategy=former, **plain)
    saved = checkpoint.load(tmp_path / "2-batch-0.ckpt", rank=0, world_size=2).shared["state_dict"]

    class Notes(Plain):
        def on_train_start(self) -> None:
            torch.save(self.state_dict(), tmp_path / f"{self.trainer.global_rank}.pt")

    options = {**plain, "strategy": strategy, "resume": tmp_path / "2-batch-0.ckpt", "max_steps": 3}
    fit(tmp_path / "here", module=Notes(), data=loader(18, 4), **options)
    for rank in range(2):
        begun = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert all(torch.equal(begun[name], value) for name, value in saved.items())


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), (local(period=3), 3)])
def test_goes_on_elsewhere_from_the_mean(strategy: Any, devices: int, tmp_path: Path) -> None:
    """Saved amid a period on two ranks: the first loss elsewhere is that of the mean of the weights."""
    plain: dict[str, Any] = {"validation": False, "seed": 5}
    fit(tmp_path, "batch", module=Plain(), data=loader(18, 4), strategy=local(period=4), devices=2, **plain)
    saved = tmp_path / "2-batch-0.ckpt"
    module = Plain().double()
    module.load_state_dict(checkpoint.load(saved, rank=0, world_size=1).shared["state_dict"])
    options = {**plain, "strategy": strategy, "devices": devices, "max_steps": 3}
    here = end(fit(tmp_path / "here", module=Plain(), data=loader(18, 4), resume=saved, **options), 0, devices)
    batches = BatchSource(loader(18, 4), Shard(), mode="global", seed=5, training=True)
    x, y = next(batches.read(4)).batch
    expected = nn.functional.cross_entropy(module.net(x), y).item()
    assert abs(here["loops"]["loss_curve"][-1][1] - expected) < 1e-12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"period": 0}, "at least 1"),
        ({"outer": "adam"}, "average, nesterov"),
        ({"outer_lr": 0.0}, "above 0"),
        ({"outer_momentum": 1.0}, "below 1"),
    ],
)
def test_options_out_of_range_are_refused_before_launch(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        train(Classifier, local(**options), 2)
