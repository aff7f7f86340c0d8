"""Complex parameters and buffers: every strategy makes of them what it makes of their real and imaginary parts, or
refuses them before any worker starts. Parameters without elements go along."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.errors import ConfigurationError
from tests.runs import Classifier, Gan, Outcome, difference, train

PARTS = [torch.randn(4, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in (1, 2)]


class Parted(Classifier):
    """Multiplies its scores with a complex matrix that is two real ones, and keeps a running mean of the products."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = (nn.Parameter(part.clone()) for part in PARTS)
        self.register_buffer("real_mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("imaginary_mean", torch.zeros(4, dtype=torch.float64))

    def product(self, scores: torch.Tensor) -> torch.Tensor:
        real, imaginary = scores @ self.real, scores @ self.imaginary
        self.real_mean.lerp_(real.detach().mean(0), 0.1)
        self.imaginary_mean.lerp_(imaginary.detach().mean(0), 0.1)
        return real.tanh() + imaginary.tanh() * 2

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.product(self.net(x)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Whole(Parted):
    """The same in complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        del self.real, self.imaginary, self.real_mean, self.imaginary_mean
        self.weight = nn.Parameter(torch.complex(*PARTS))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.complex128))

    def product(self, scores: torch.Tensor) -> torch.Tensor:
        product = scores.to(torch.complex128) @ self.weight
        self.mean.lerp_(product.detach().mean(0), 0.1)
        return product.real.tanh() + product.imag.tanh() * 2


class ByHand(Whole):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss


def in_parts(outcome: Outcome) -> Outcome:
    weights = outcome.weights
    for name, (real, imaginary) in {"weight": ("real", "imaginary"), "mean": ("real_mean", "imaginary_mean")}.items():
        number = weights.pop(name)
        weights |= {real: number.real, imaginary: number.imag}
    return outcome


FULL_RANK = {"name": "powersgd", "rank": 64, "min_compression_rate": 0}
TAKEN: list[tuple[Any, int, dict[str, Any]]] = [
    ("single", 1, {}),
    ("ddp", 2, {}),
    ("ring", 3, {"gradient_clip_val": 0.1}),
    ("ddp", 2, {"compression": FULL_RANK}),
    ("ring", 2, {"compression": {"name": "topk", "ratio": 1.0}}),
    ({"name": "local_sgd", "period": 3}, 2, {}),
    ({"name": "local_sgd", "period": 3, "outer": "nesterov"}, 2, {}),
    ("gossip", 3, {}),
    ("elastic_averaging", 2, {}),
    ("federated", 2, {}),
    ("parameter_server", 2, {}),
]


@pytest.mark.parametrize(("strategy", "devices", "options"), TAKEN, ids=str)
def test_a_complex_number_is_its_two_parts(strategy: Any, devices: int, options: dict[str, Any]) -> None:
    parted, whole = (train(make, strategy, devices, **options) for make in (Parted, Whole))
    assert max(difference(parted, in_parts(whole)).values()) < 1e-10


@pytest.mark.parametrize("compression", [FULL_RANK, {"name": "topk", "ratio": 1.0}], ids=str)
@pytest.mark.parametrize("make", [Whole, ByHand])
def test_what_is_declared_exact_is_the_run_of_single(make: type[Whole], compression: Any) -> None:
    # Each rank keeps its own running mean, as it does under every other averaging of gradients.
    one, many = train(make), train(make, "ddp", 2, compression=compression)
    one.weights.pop("mean"), many.weights.pop("mean")
    assert max(difference(one, many).values()) < 1e-10


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("make", [Whole, ByHand])
def test_small_formats_keep_the_imaginary_part(make: type[Whole], name: str) -> None:
    dense, small = (train(make, "ddp", 2, compression=one) for one in ("none", name))
    assert 0 < float((dense.weights["weight"] - small.weights["weight"]).abs().max()) < 2e-3


REFUSED: list[tuple[Any, dict[str, Any]]] = [
    ("fsdp", {}),
    ("zero", {"precision": "32-true"}),
    ({"name": "zero", "stage": 0}, {"precision": "32-true"}),
    ({"name": "mesh", "shard": 2, "tensor": 1}, {}),
]


@pytest.mark.parametrize(("strategy", "options"), REFUSED, ids=str)
def test_engines_that_hold_real_numbers_only_refuse(strategy: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"parameter weight is complex, .* use strategy=ddp"):
        train(Whole, strategy, 2, **options)


class Emptied(Gan):
    """A third optimizer has nothing but a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        *_, third = self.optimizers()
        self.manual_backward(self.nothing.sum() + self.generator(batch[0]).sum() * 0)
        third.step()
        self.log("steps", 1.0)

    def configure_optimizers(self) -> Any:
        return [*super().configure_optimizers(), torch.optim.SGD([self.nothing], lr=0.1)]


@pytest.mark.parametrize("name", ["none", "fp16", "bf16", "int8", "topk", "powersgd"])
def test_an_optimizer_of_empty_parameters_steps(name: str) -> None:
    assert train(Emptied, "ring", 2, compression=name, max_epochs=1).weights["nothing"].shape == (0, 3)
