"""Errors of torch's that a module meets because of how a strategy holds it: what is so and the way out stand beside."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.errors import WorkerError
from drivetrain_plugins.strategies.declared.explained import EMPTY
from tests.runs import Classifier, Gan, difference, seeded, train


class Averages(Classifier):
    """Keeps an average of its weights by hand."""

    def on_fit_start(self) -> None:
        self.average = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.named_parameters()}

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                self.average[name].lerp_(parameter, 0.1)


class Penalised(Classifier):
    """A penalty on the slope of the scores."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        if layers == 1:
            self.net = seeded(lambda: nn.Linear(6, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return nn.functional.cross_entropy(self.net(x), batch[1]) + slope.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class Once(Penalised):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_(True)
        scores = self.net(x)
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return nn.functional.cross_entropy(scores, batch[1]) + slope.square().mean()


class Critic(Gan):
    """The same, stepped by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        _, second = self.optimizers()
        x = batch[0].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.critic(x).sum(), x, create_graph=True)
        self.manual_backward(nn.functional.softplus(self.critic(x)).mean() + slope.square().mean())
        second.step()
        second.zero_grad()


class Thrown(Critic):
    """Zeroes the gradients of such a loss, and steps by another's."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        _, second = self.optimizers()
        x = batch[0].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.critic(x).sum(), x, create_graph=True)
        self.manual_backward(slope.square().mean())
        second.zero_grad()
        self.manual_backward(nn.functional.softplus(self.critic(batch[0])).mean())
        second.step()


class ByItself(Gan):
    """Goes back without ``manual_backward``, and after it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(nn.functional.softplus(-self.critic(batch[0])).mean())
        nn.functional.softplus(self.critic(self.generator(batch[0]))).mean().backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()


class OfOne(Gan):
    """Goes back to the parameters of one network only."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.softplus(self.critic(self.generator(batch[0]))).mean()
        self.manual_backward(loss, inputs=list(self.generator.parameters()))


class FlatByHand(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.softplus(self.critic(batch[0])).mean()
        slopes = torch.autograd.grad(loss, self.critic.parameters(), create_graph=True, allow_unused=True)
        self.manual_backward(loss + sum(slope.square().sum() for slope in slopes if slope is not None))


class GoesBackLate(Classifier):
    """Makes a backward pass in a hook, when gradients are averaged."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        setattr(self, hook, self.late)

    def late(self, *arguments: Any) -> None:
        self.net(torch.ones(1, 6, dtype=torch.float64) * self.trainer.global_rank).sum().backward()


class GoesBackTwice(Classifier):
    """Adds to its gradient in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.on_after_backward = self.on_before_optimizer_step = self.again
        blocks = (seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())) for _ in range(2))
        self.net = nn.Sequential(*blocks, seeded(lambda: nn.Linear(6, 4)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.x = batch[0]
        return super().training_step(batch, batch_idx)

    def again(self, *arguments: Any) -> None:
        self.net(self.x).square().mean().backward()


class Adversarial(Classifier):
    """Goes forward again where the slope of a first pass points to; on the last of several ranks batch 1 has no loss
    where it ``skips``."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(*(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())) for _ in range(3)))
        self.head = seeded(lambda: nn.Linear(6, 4))
        self.skips = skips

    def score(self, x: torch.Tensor) -> Any:
        return self.head(self.net(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.skips and batch_idx == 1 and self.trainer.global_rank == 1:
            return None
        x = batch[0].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(nn.functional.cross_entropy(self.score(x), batch[1], reduction="sum"), x)
        return nn.functional.cross_entropy(self.score(batch[0] + 0.1 * slope), batch[1])


class Bare(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise RuntimeError("a DTensor of my own")


class Sharpness(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        slopes = torch.autograd.grad(loss, [*self.parameters()], create_graph=True)
        return loss + sum(slope.square().sum() for slope in slopes)


class Flat(Sharpness):
    """Leaves out slopes that there are none of."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        slopes = torch.autograd.grad(loss, self.parameters(), create_graph=True, allow_unused=True)
        return loss + sum(slope.square().sum() for slope in slopes if slope is not None)


class NoMatrix(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.mm(batch[0], torch.ones(3, dtype=batch[0].dtype))


LAYERS = {"name": "fsdp", "wrap": "Linear"}
ZERO = {"name": "zero", "stage": 3}
SERVED = {"name": "parameter_server", "embedded": True}
LATE = r"a hook makes a backward pass when strategy=\w+ has averaged the step's gradients"


@pytest.mark.parametrize(
    ("make", "strategy", "said"),
    [
        (
            Averages,
            "fsdp",
            r"DTensor.* \(in on_train_batch_end, step 1: strategy=fsdp holds parameters as shards.*ddp\)",
        ),
        (Penalised, LAYERS, r"\(in .*: strategy=fsdp frees whole weights .*: use strategy=ddp\)"),
        (lambda: Penalised(1), LAYERS, r"a gradient of net.weight came when strategy=fsdp had .* needs strategy=ddp"),
        (Critic, "fsdp", r"a gradient of critic.weight came when strategy=fsdp had .* needs strategy=ddp"),
        (Thrown, "fsdp", r"a gradient of critic.weight came when strategy=fsdp had .* needs strategy=ddp"),
        (lambda: GoesBackLate("on_after_backward"), "ring", LATE),
        (lambda: GoesBackLate("on_before_optimizer_step"), "ddp", LATE),
        (lambda: GoesBackLate("on_before_optimizer_step"), SERVED, LATE),
        (OfOne, "fsdp", r"backward\(inputs=...\) finds no way to parameters .*, or use strategy=ddp"),
        (FlatByHand, "fsdp", r"finds no way to parameters that a rank holds a part of.* needs strategy=ddp"),
        (lambda: Adversarial(skips=True), "fsdp", r"training_step returned None on rank 1: with sharded parameters"),
        (Penalised, ZERO, r"\(in .*: strategy=zero with stage=3 leaves parameters empty between passes"),
        (NoMatrix, ZERO, r"must be a matrix.* \(in .*: strategy=zero with stage=3 leaves .* which may be why"),
        (NoMatrix, {"name": "zero", "stage": 2}, r"must be a matrix.* \(in NoMatrix.training_step, [^:]*\)$"),
        (Sharpness, LAYERS, r"\(in .*: strategy=fsdp computes with whole weights in the place of parameters"),
        (Flat, LAYERS, r"finds no way to parameters that a rank holds a part of.* needs strategy=ddp"),
        (Flat, "pipeline", r"finds no way to parameters that other ranks of a pipeline hold.* needs strategy=ddp"),
        (Once, "pipeline", r"\(in .*: the step of strategy=pipeline has what comes out of the network"),
    ],
)
def test_what_a_strategy_does_not_take_says_why(make: Any, strategy: Any, said: str) -> None:
    precision = "32-true" if "zero" in str(strategy) else "64-true"
    with pytest.raises(WorkerError) as caught:
        train(make, strategy, 2, max_epochs=1, precision=precision)
    assert re.search(said, str(caught.value).splitlines()[0])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", {"name": "parameter_server", "embedded": True}])
def test_penalties_on_slopes_where_they_can_be(strategy: Any) -> None:
    for make in (Penalised, Once):
        assert max(difference(train(make), train(make, strategy, 2)).values()) < 1e-10
    if strategy == "ddp":
        assert max(difference(train(Critic), train(Critic, strategy, 2)).values()) < 1e-10


@pytest.mark.parametrize("strategy", ["ring", "fsdp"])
def test_a_backward_pass_by_itself_counts_what_its_samples_do(strategy: str) -> None:
    """On three ranks, whose parts of a batch of eight differ."""
    for make in (ByItself, GoesBackTwice) if strategy == "fsdp" else (ByItself,):
        more = {} if make is ByItself else {"accumulate_grad_batches": 2}
        assert max(difference(train(make, **more), train(make, strategy, 3, **more)).values()) < 1e-10


def test_slopes_that_a_step_takes_by_itself() -> None:
    assert max(difference(train(Adversarial), train(Adversarial, "fsdp", 2)).values()) < 1e-10


def test_others_errors_stay_as_they_are() -> None:
    with pytest.raises(WorkerError) as caught:
        train(Bare, "ddp", 2, max_epochs=1)
    assert (
        str(caught.value)
        .splitlines()[0]
        .endswith("a DTensor of my own (in Bare.training_step, batch 0 of epoch 0, step 1)")
    )


def test_an_empty_parameter_is_known_by_torchs_words() -> None:
    (pattern,) = EMPTY
    for bad in (lambda: torch.zeros(3).add_(torch.empty(0)), lambda: torch.mm(torch.ones(2, 2), torch.empty(0))):
        with pytest.raises(RuntimeError) as caught:
            bad()
        assert re.search(pattern, str(caught.value))
