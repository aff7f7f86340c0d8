"""Zeroing and stepping are torch's own wherever anybody has a hand in them, and have torch's effect everywhere."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from drivetrain.unprofiled import step, zero_grad
from tests.runs import Classifier, train


def layer_with_gradients() -> nn.Linear:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    return layer


class Keeps(SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


class Marked(SGD):
    """A stranger's, with a step around torch's."""

    def step(self, closure: Any = None) -> Any:
        self.marks = getattr(self, "marks", 0) + 1
        return super().step(closure)


def test_gradients_are_zeroed_in_the_optimizers_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(2, 2)
    kept, patched, plain = Keeps(layer.parameters()), SGD(layer.parameters()), SGD(layer.parameters())
    patched.zero_grad = kept.zero_grad  # type: ignore[method-assign]
    for optimizer, gone in ((kept, False), (patched, False), (plain, True)):
        layer(torch.ones(1, 2)).sum().backward()
        zero_grad(optimizer)
        assert all((p.grad is None) if gone else not p.grad.any() for p in layer.parameters())

    called: list[Any] = []
    with monkeypatch.context() as everywhere:  # as tools do that count or time such calls
        everywhere.setattr(Optimizer, "zero_grad", lambda self, *args: called.append(self))
        zero_grad(plain)
    assert called == [plain]


@pytest.mark.parametrize("make", [SGD, Adam, Marked])
def test_a_step_has_the_effect_of_the_optimizers_own(make: Any) -> None:
    ours = layer_with_gradients()
    torchs = nn.Linear(2, 2)
    torchs.load_state_dict(ours.state_dict())
    for mine, other in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert mine.grad is not None
        other.grad = mine.grad.clone()
    optimizer, reference = make(ours.parameters(), lr=0.1), make(torchs.parameters(), lr=0.1)
    for _ in range(3):
        step(optimizer)
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), torchs.parameters(), strict=True))
    assert getattr(optimizer, "marks", None) == (3 if make is Marked else None)
    assert torch.is_grad_enabled()


def test_a_step_calls_every_hook() -> None:
    optimizer = SGD(layer_with_gradients().parameters(), lr=0.1)
    seen: list[str] = []
    step(optimizer)
    for name, register in (
        ("pre", optimizer.register_step_pre_hook),
        ("post", optimizer.register_step_post_hook),
        ("global pre", register_optimizer_step_pre_hook),
        ("global post", register_optimizer_step_post_hook),
    ):
        handle = register(lambda *args, name=name: seen.append(name))  # type: ignore[operator]
        step(optimizer)
        handle.remove()
    step(optimizer)
    assert seen == ["pre", "post", "global pre", "global post"]


def test_a_step_that_somebody_put_in_its_place_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def around(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # which copies every mark that torch makes
        def counted(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return function(*args, **kwargs)

        return counted

    optimizer = SGD(layer_with_gradients().parameters(), lr=0.1)
    with monkeypatch.context() as everywhere:
        everywhere.setattr(SGD, "step", around("class", SGD.step))
        step(optimizer)
    monkeypatch.setattr(optimizer, "step", around("object", optimizer.step))
    step(optimizer)
    assert called == ["class", "object"]


def test_a_scheduler_sees_the_step() -> None:
    optimizer = SGD(layer_with_gradients().parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 1, 0.5)
    step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, of a scheduler that steps before its optimizer
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_profiler_sees_both(run_alone: Callable[..., Any]) -> None:
    def profiled() -> list[str]:
        optimizer = SGD(layer_with_gradients().parameters(), lr=0.1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            step(optimizer)
            zero_grad(optimizer)
        return [event.key for event in profiler.key_averages()]

    names = run_alone(profiled)
    assert any("zero_grad" in name for name in names) and any("Optimizer.step#SGD" in name for name in names)


class Unscheduled(Classifier):
    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


def test_a_training_goes_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the tests above were of nothing: torch's record is not entered."""
    entered: list[str] = []
    real = torch.autograd.profiler.record_function.__enter__

    def noted(self: Any) -> Any:
        entered.append(self.name)
        return real(self)

    monkeypatch.setattr(torch.autograd.profiler.record_function, "__enter__", noted)
    train(Unscheduled, max_epochs=1)
    assert not [name for name in entered if "Optimizer" in name]
