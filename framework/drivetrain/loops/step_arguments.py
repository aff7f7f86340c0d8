"""What a step of the module is called with, as its signature asks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from drivetrain.errors import MisuseError
from drivetrain.sharding import MicroBatch


def takes(step: Callable[..., Any], name: str, position: int) -> bool:
    """Whether ``step`` has a parameter called ``name``, or any at that position (from 0) or ``*args``."""
    parameters = inspect.signature(step).parameters
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    return name in parameters or variadic or len(positional) > position


def step_arguments(step: Callable[..., Any], several_loaders: bool) -> Callable[[MicroBatch, Any], tuple[Any, ...]]:
    """What to call ``step`` with: the batch, and ``batch_idx`` and ``dataloader_idx`` where its signature has them."""
    index = takes(step, "batch_idx", 1)
    loader = several_loaders and takes(step, "dataloader_idx", 2)

    def arguments(micro: MicroBatch, batch: Any) -> tuple[Any, ...]:
        if not index:
            return (batch,)
        return (batch, micro.index, micro.loader) if loader else (batch, micro.index)

    return arguments


def check_loader_index(module: Any, stage: str, several_loaders: bool) -> None:
    """Refuse what wants to be told which loader a batch is of where there is only one, of which it is not told.

    Raises:
        MisuseError: a step or a hook of the module takes ``dataloader_idx`` without a default.
    """
    for name in (f"{stage}_step", f"on_{stage}_batch_start", f"on_{stage}_batch_end"):
        hook = None if several_loaders else getattr(module, name, None)
        parameter = None if hook is None else inspect.signature(hook).parameters.get("dataloader_idx")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            raise MisuseError(
                f"{type(module).__name__}.{name} takes dataloader_idx, which is not given where there is one loader:"
                " leave it out, or give it a default (dataloader_idx=0)."
            )
