"""``loss.backward()`` in a step that a module makes by hand: it counts what ``manual_backward`` of that loss would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor


class PlainBackward:
    """
    Attributes:
        counted: whether who calls ``backward`` at the moment has seen to what the loss counts.
    """

    def __init__(self) -> None:
        self.counted = False

    @contextmanager
    def weighing(self, factor: float) -> Iterator[None]:
        """While it lasts backward passes that are not ``counted`` are of ``factor`` times their losses: of ranks whose
        parts of a batch differ in size each would weigh the same in the mean that an optimizer finds."""
        original = torch.autograd.backward

        @wraps(original)
        def backward(tensors: Any, *arguments: Any, **options: Any) -> None:
            if not self.counted:
                listed = (tensors,) if isinstance(tensors, Tensor) else tensors
                tensors = tuple(one * factor if isinstance(one, Tensor) else one for one in listed)
            original(tensors, *arguments, **options)

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = original
