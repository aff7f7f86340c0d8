"""Hooks that are called where other strategies have all gradients, and this one has not."""

from __future__ import annotations

import warnings

from lightning_utilities.core.overrides import is_overridden

from drivetrain.callback import Callback
from drivetrain.module import TrainModule

HOOKS = ("on_after_backward", "on_before_optimizer_step")


def tell_what_they_find(module: TrainModule, where: str, found: str) -> None:
    """Warn, on the first rank, of each of :data:`HOOKS` that ``module`` or a callback has: nothing shows whether one
    only counts steps or computes a norm, which would be another than under other strategies.

    Args:
        where: the strategy, as it is asked for.
        found: which gradients the parameters have there.
    """
    trainer = module.trainer
    if trainer.global_rank:
        return
    owners = [(module, TrainModule), *((callback, Callback) for callback in trainer.callbacks)]
    names = [f"{type(one).__name__}.{name}" for one, base in owners for name in HOOKS if is_overridden(name, one, base)]
    if names:
        warnings.warn(
            f"under {where} parameters have {found} when {' and '.join(names)} is called: what is read or changed of"
            " gradients there is not what it is under strategy=ddp.",
            stacklevel=2,
        )
