"""Backward passes that hooks make when ranks have averaged their gradients: each rank would step with gradients of its
own, and what were replicas would be none any more, without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from drivetrain.errors import TrainingError


@contextmanager
def refused(module: nn.Module, way: str) -> Iterator[None]:
    """Around hooks: a backward pass of theirs to parameters of ``module`` is refused.

    Raises:
        TrainingError: there is one; ``way`` says under which strategy.
    """
    original = torch.autograd.backward

    def backward(*arguments: Any, **options: Any) -> None:
        before = _gradients(module)
        original(*arguments, **options)
        if _gradients(module) != before:
            raise TrainingError(
                f"a hook makes a backward pass when {way} has averaged the step's gradients, so that each rank would"
                " step with gradients of its own: add that loss to the one that training_step returns, or"
                " optimise by hand (automatic_optimization=False)."
            )

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original


def without(before_step: Callable[[], None], module: nn.Module, way: str) -> Callable[[], None]:
    """``before_step``, whose hooks make no such pass."""

    def watched() -> None:
        with refused(module, way):
            before_step()

    return watched


def _gradients(module: nn.Module) -> list[tuple[int, int]]:
    """What tells whether a gradient has come or was added to."""
    found = [parameter.grad for parameter in module.parameters()]
    return [(0, 0) if gradient is None else (id(gradient), gradient._version) for gradient in found]
