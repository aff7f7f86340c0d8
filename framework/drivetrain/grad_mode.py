"""A data set's own say on whether gradients are recorded, kept apart from the loop's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_OVER = object()


def in_its_own_mode(iterator: Iterator[Any]) -> Iterator[Any]:
    """What ``iterator`` gives. One that rests within ``torch.no_grad()`` between two items (roll-outs of a policy)
    leaves gradients off for itself only, and finds them off again."""
    own = torch.is_grad_enabled()
    while True:
        outer = torch.is_grad_enabled()
        if own != outer:
            torch.set_grad_enabled(own)
        try:
            item = next(iterator, _OVER)
        finally:
            own = torch.is_grad_enabled()
            if own != outer:
                torch.set_grad_enabled(outer)
        if item is _OVER:
            return
        yield item
