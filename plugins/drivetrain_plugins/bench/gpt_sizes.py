"""The models of ``python -m drivetrain.bench gpt``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """A GPT and its micro-batch."""

    vocab: int
    context: int
    layers: int
    heads: int
    width: int
    batch: int


SIZES = {
    "gpt2": Size(50304, 1024, 12, 12, 768, 32),  # 124 million parameters, tied
    "small": Size(8192, 64, 6, 8, 512, 4),  # 23 million parameters and few tokens: what is exchanged takes the time
    "tiny": Size(256, 64, 4, 4, 64, 8),
}
