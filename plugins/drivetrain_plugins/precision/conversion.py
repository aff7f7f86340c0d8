"""Bring the floating-point tensors of a module or a batch to one dtype; everything else stays as it is."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from drivetrain.errors import ConfigurationError


def convert_floating(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters, gradients and buffers in place: parameters stay the same objects, ties stay ties.

    Integer and complex tensors are left alone (``module.to(dtype)`` would drop the imaginary part).
    """
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None if gradient is None else gradient.to(dtype)
    converted: dict[int, Tensor] = {}
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_floating_point() and buffer.dtype != dtype:
                if id(buffer) not in converted:
                    converted[id(buffer)] = buffer.to(dtype)
                setattr(child, name, converted[id(buffer)])


_DTYPES = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_OTHERS = frozenset(dtype for dtype in _DTYPES if not dtype.is_floating_point)
_STAYS = {dtype: _OTHERS | {dtype} for dtype in _DTYPES}  # what a cast to each leaves as it is


def cast_floating(batch: Any, dtype: torch.dtype) -> Any:
    """The batch, nested as it likes, with its floating-point tensors in ``dtype``; the same object if they are."""
    kind = type(batch)
    if kind is tuple or kind is list:  # by far the most frequent batch, and this is called at every step
        stays = _STAYS[dtype]
        for item in batch:
            if type(item) is not Tensor or item.dtype not in stays:
                break
        else:
            return batch
    return apply_to_collection(batch, Tensor, _cast, dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def refuse_loss_scale(name: str, loss_scale: float | str | None) -> None:
    """Raise :class:`ConfigurationError` if a loss scale is given to a format that does not scale."""
    if loss_scale is not None:
        raise ConfigurationError(
            f"precision={name} does not scale losses: leave loss_scale={loss_scale} out or use precision=16-mixed."
        )
