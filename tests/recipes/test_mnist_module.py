"""The digits' network: its shape, its options, what it logs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, which sets a variable and makes a folder
from torch import nn

from drivetrain.errors import ConfigurationError
from recipes.mnist.module import MnistClassifier


def batch(size: int = 8, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 1, 28, 28, generator=generator, dtype=dtype)
    return images, torch.randint(10, (size,), generator=generator)


def test_it_is_the_network_that_was_promised() -> None:
    module = MnistClassifier()
    assert module(batch(3)[0]).shape == (3, 10)
    assert sum(p.numel() for p in module.parameters()) == 1_199_882
    shapes = [tuple(p.shape) for p in module.parameters() if p.ndim > 1]
    assert shapes == [(32, 1, 3, 3), (64, 32, 3, 3), (128, 9216), (10, 128)]


@pytest.mark.parametrize(
    ("dropout", "expected"),
    [((0.25, 0.5), [0.25, 0.5]), ([0.1, 0.2], [0.1, 0.2]), (0.3, [0.3, 0.3]), (0, [0.0, 0.0])],
)
def test_dropout_is_one_number_or_two(dropout: Any, expected: list[float]) -> None:
    module = MnistClassifier(dropout=dropout)
    assert [m.p for m in module.modules() if isinstance(m, nn.Dropout)] == expected


def test_without_dropout_nothing_is_random() -> None:
    images, _ = batch()
    module = MnistClassifier(dropout=0).train()
    assert torch.equal(module(images), module(images))
    module = MnistClassifier().train()
    assert not torch.equal(module(images), module(images))


@pytest.mark.parametrize("dropout", [1, -0.1, (0.1,), (0.1, 0.2, 0.3), (0.1, 1.0), ("a", "b")])
def test_impossible_dropout_is_refused(dropout: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"model\.dropout="):
        MnistClassifier(dropout=dropout)


def test_adam_is_the_default_optimizer() -> None:
    module = MnistClassifier()
    optimizer = module.configure_optimizers()
    [group] = optimizer.param_groups
    assert type(optimizer) is torch.optim.Adam
    assert group["lr"] == 1e-3
    assert [id(p) for p in group["params"]] == [id(p) for p in module.parameters()]


def test_optimizer_and_schedule_can_be_given() -> None:
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    configured = MnistClassifier(optimizer=partial(torch.optim.SGD, lr=0.1), scheduler=schedule).configure_optimizers()
    assert type(configured["optimizer"]) is torch.optim.SGD
    assert type(configured["lr_scheduler"]) is torch.optim.lr_scheduler.StepLR
    assert configured["lr_scheduler"].optimizer is configured["optimizer"]


@pytest.mark.parametrize("stage", ["train", "val", "test"])
def test_loss_and_accuracy_are_logged_under_their_names(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    module = MnistClassifier(dropout=0)
    logged: dict[str, torch.Tensor] = {}
    shown: list[str] = []

    def log(name: str, value: torch.Tensor, prog_bar: bool = False, **_: Any) -> None:
        logged[name] = value
        if prog_bar:
            shown.append(name)

    monkeypatch.setattr(module, "log", log)
    step = {"train": module.training_step, "val": module.validation_step, "test": module.test_step}[stage]
    outcome = step(batch(), 0)
    assert set(logged) == {f"{stage}/loss", f"{stage}/accuracy"}
    assert shown == (["val/accuracy"] if stage == "val" else [])
    images, labels = batch()
    scores = module(images)
    assert torch.equal(logged[f"{stage}/loss"], nn.functional.cross_entropy(scores, labels))
    assert float(logged[f"{stage}/accuracy"]) == (scores.argmax(1) == labels).sum().item() / 8
    if stage == "train":
        assert outcome.requires_grad
        assert outcome.ndim == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_accuracy_is_exact_in_every_precision(dtype: torch.dtype) -> None:
    module = MnistClassifier(dropout=0).to(dtype)
    images, labels = batch(250, dtype)
    loss, accuracy = module.judge((images, labels))
    assert loss.dtype == dtype
    assert float(accuracy) == (module(images).argmax(1) == labels).sum().item() / 250


def test_prediction_is_a_digit_for_each_image() -> None:
    module = MnistClassifier().eval()
    digits = module.predict_step(batch(5), 0)
    assert torch.equal(digits, module(batch(5)[0]).argmax(1))
