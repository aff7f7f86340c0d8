"""Numbers to tensors and back, in any nesting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from drivetrain.data_hooks import move


def _of_array(value: Any, device: Any) -> Tensor:
    return torch.from_numpy(value).to(device)


CONVERSION_DTYPES: list[tuple[Any, Callable[..., Tensor]]] = [
    (bool, partial(torch.tensor, dtype=torch.uint8)),  # NCCL moves no truth values
    (int, partial(torch.tensor, dtype=torch.int)),
    (float, partial(torch.tensor, dtype=torch.float)),
    (np.ndarray, _of_array),
]


def convert_to_tensors(data: Any, device: Any) -> Any:
    """``data`` with its truth values (as uint8), numbers (int32, float32) and arrays as tensors on ``device``."""
    for kind, conversion in CONVERSION_DTYPES:
        data = apply_to_collection(data, kind, conversion, device=device)
    return move(data, torch.device(device))


def convert_tensors_to_scalars(data: Any) -> Any:
    """``data`` with numbers in the place of its tensors.

    Raises:
        ValueError: a tensor holds not just one.
    """

    def number(tensor: Tensor) -> Any:
        if tensor.numel() != 1:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is no number: give one of a single element.")
        return tensor.item()

    return apply_to_collection(data, Tensor, number)
