"""LambdaCallback: a callback made of functions given by hook name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drivetrain.callback import Callback
from drivetrain.errors import UnknownArgumentError, nearest

_HOOKS = frozenset(name for name in dir(Callback) if name.startswith("on_")) | {"setup", "teardown"}


class LambdaCallback(Callback):
    """``LambdaCallback(on_train_start=lambda trainer, pl_module: ...)``: each function gets what its hook gets.

    Raises:
        UnknownArgumentError: a name that is no hook.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in _HOOKS:
                raise UnknownArgumentError(f"LambdaCallback has no hook {name!r}: {nearest(name, _HOOKS)}")
            if function is not None:
                setattr(self, name, function)
