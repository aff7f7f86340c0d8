"""Slopes that a step takes by parameters of which this rank has none: ``autograd.grad(..., allow_unused=True)`` gives
None for them, as for parameters that nothing was computed with, and a penalty on them was left out without a word. So
it is with ``backward(inputs=...)``, which gives them no gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from drivetrain.errors import TrainingError


@contextmanager
def watched(is_elsewhere: Callable[[Any], bool], why: str) -> Iterator[None]:
    """While it lasts ``torch.autograd.grad`` refuses to find nothing at all for those of its inputs that
    ``is_elsewhere``, and a backward pass to be one to such inputs.

    Raises:
        TrainingError: it found nothing; ``why`` it could not.
    """
    original, original_pass = torch.autograd.grad, torch.autograd.backward

    @wraps(original)
    def grad(outputs: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        listed = (inputs,) if isinstance(inputs, (Tensor, GradientEdge)) else tuple(inputs)
        found = original(outputs, listed, *arguments, **options)
        of_others = [slope for one, slope in zip(listed, found, strict=True) if is_elsewhere(one)]
        if of_others and all(slope is None for slope in of_others):
            raise TrainingError(
                f"autograd.grad(..., allow_unused=True) finds no way to parameters that {why}: a penalty on slopes by"
                " parameters needs strategy=ddp."
            )
        return found

    @wraps(original_pass)
    def backward(*arguments: Any, **options: Any) -> None:
        inputs = options.get("inputs")
        listed = () if inputs is None else (inputs,) if isinstance(inputs, (Tensor, GradientEdge)) else tuple(inputs)
        if any(is_elsewhere(one) for one in listed):
            raise TrainingError(
                f"backward(inputs=...) finds no way to parameters that {why}: leave inputs out and call"
                " self.toggle_optimizer before, or use strategy=ddp."
            )
        original_pass(*arguments, **options)

    torch.autograd.grad, torch.autograd.backward = grad, backward
    try:
        yield
    finally:
        torch.autograd.grad, torch.autograd.backward = original, original_pass
