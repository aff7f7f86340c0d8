"""Hooks that are called where other strategies have all gradients and weights, and this one has not."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from lightning_utilities.core.overrides import is_overridden

from drivetrain.callback import Callback
from drivetrain.module import TrainModule

_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")
_BETWEEN_PASSES = (
    *(f"on_train_{when}" for when in ("start", "batch_start", "batch_end", "epoch_start", "epoch_end")),
    *(f"on_validation_{when}" for when in ("start", "epoch_start", "epoch_end", "end")),
)


def tell_which_gradients(module: TrainModule, where: str, found: str) -> None:
    """Warn, on the first rank, of the hooks between backward pass and step that ``module`` or a callback has: nothing
    shows whether one only counts steps or computes a norm, which would be another than under other strategies.

    Args:
        where: the strategy, as it is asked for.
        found: which gradients the parameters have there.
    """
    if names := _of_the_project(module, _GRADIENTS):
        warnings.warn(
            f"under {where} parameters have {found} when {names} is called: what is read or changed of gradients there"
            " is not what it is under strategy=ddp.",
            stacklevel=2,
        )


def tell_of_empty_weights(module: TrainModule, where: str, way_out: str) -> None:
    """Warn, on the first rank, of the hooks between passes that ``module`` or a callback has, where parameters hold
    nothing: what is computed of them or written to them there is lost without an error."""
    if names := _of_the_project(module, _BETWEEN_PASSES):
        warnings.warn(
            f"under {where} parameters are empty when {names} is called: if it reads or writes weights {way_out}.",
            stacklevel=2,
        )


def _of_the_project(module: TrainModule, hooks: Iterable[str]) -> str:
    """Those of ``hooks`` that the module or a callback of the project's own has; none on other ranks."""
    return "" if module.trainer.global_rank else " and ".join(hooks_of_the_project(module, hooks))


def hooks_of_the_project(module: TrainModule, hooks: Iterable[str]) -> list[str]:
    """Those of ``hooks`` that the module or a callback has on this rank, and that are the project's own."""
    owners = [(module, TrainModule), *((callback, Callback) for callback in module.trainer.callbacks)]
    return [f"{type(one).__name__}.{name}" for one, base in owners for name in hooks if _is_own(one, name, base)]


def _is_own(owner: Any, hook: str, base: type) -> bool:
    # A class of the project's may have a hook from one of ours, and an object of ours one that it was given.
    where = getattr(getattr(owner, hook, None), "__module__", None) or ""
    return is_overridden(hook, owner, base) and not where.startswith(("drivetrain.", "drivetrain_plugins."))
