"""Finding out whether a step computes with weights while they are empty: beside their layers' forward pass, under
strategy=zero with stage=3."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from drivetrain.module import TrainModule
from drivetrain_plugins.strategies.stale_reads import StaleReads
from drivetrain_plugins.strategies.zero_state import trained

WAY_OUT = "let it do so within deepspeed.zero.GatheredParameters, or use strategy.stage=2"


class EmptyReads:
    """Watches the first batch of training and of evaluation: later steps do as the first did.

    Args:
        tells: whether this rank warns.

    Attributes:
        at_hand: what the forward pass at hand is to be made within.
    """

    def __init__(self, module: TrainModule, tells: bool) -> None:
        self._module, self._tells = module, tells
        self._watched: set[str] = set()  # kinds of steps whose first one was looked at
        self.at_hand: AbstractContextManager[object] = nullcontext()

    @contextmanager
    def watching(self, kind: str) -> Iterator[None]:
        """Around a step of ``kind``: warn where the first of them computes with parameters while they are empty."""
        if kind in self._watched:
            yield
            return
        self._watched.add(kind)
        self.at_hand = reads = StaleReads(trained(self._module.named_parameters()), _is_empty)
        try:
            yield
        finally:
            self.at_hand = nullcontext()
        if reads.found and self._tells:
            names = [*reads.found]
            warnings.warn(
                f"a step of {type(self._module).__name__} computes with weights beside their layers' forward pass"
                f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}), where they are empty under"
                f" strategy=zero with stage=3: {WAY_OUT}.",
                stacklevel=2,
            )


def _is_empty(parameter: Tensor) -> bool:
    """Whether a function is given ``parameter`` while it is empty, other than by the engine, which gathers it."""
    if parameter.numel():
        return False
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    return not frame.f_globals.get("__name__", "").startswith("deepspeed.")
