"""Error feedback: what a compressor did not send is owed, and added to the next gradient (Seide et al., 2014;
Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019).

    acc = gradient + owed,   sent = C(acc),   owed = acc - sent

so that over any number of steps what was sent and what is still owed add up to the gradients. The debt is this rank's
own, kept by parameter in the gradient's units: without the loss scale, which changes.
"""

from __future__ import annotations

import torch

from drivetrain.compressor import Memory, Segment

_OWED = "owed"


def add_owed(flat: torch.Tensor, segments: tuple[Segment, ...], memory: Memory) -> None:
    """Add to each gradient in ``flat``, in place, what is owed of it."""
    places, owed = [], []
    for segment in segments:
        value = memory.get(_OWED, segment.name)
        if value is not None:
            places.append(flat[segment.start : segment.stop])
            owed.append(value)
    if places:
        torch._foreach_add_(places, owed)


def keep_owed(flat: torch.Tensor, sent: torch.Tensor, segments: tuple[Segment, ...], memory: Memory) -> None:
    """Keep what of ``flat`` was not ``sent``."""
    owed = flat - sent
    for segment in segments:
        memory.put(_OWED, segment.name, owed[segment.start : segment.stop])
