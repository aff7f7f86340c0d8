"""Whether weights are still those that a server sent: what a hook does to them elsewhere would be lost in silence."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """Bits of each tensor's sum and of the sum of its absolute values, in fp64: equal for equal tensors, and other
    weights with both the same do not come about by accident. Integers are left out."""
    floating = [t.detach() for t in tensors if t.is_floating_point()]
    if not floating:
        return torch.empty(0, dtype=torch.int64)
    sizes = torch._foreach_norm(floating, 1, dtype=torch.float64)
    sums = [t.sum(dtype=torch.float64) for t in floating]
    return torch.stack([*sizes, *sums]).view(torch.int64).cpu()  # as bits, in which a NaN equals itself
