"""LambdaCallback: a callback made of functions given by hook name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drivetrain.callback import Callback
from drivetrain.errors import UnknownArgumentError, nearest

_HOOKS = frozenset(name for name in dir(Callback) if name.startswith("on_")) | {"setup", "teardown"}

_Hook = Callable[..., Any] | None


class LambdaCallback(Callback):
    """``LambdaCallback(on_train_start=lambda trainer, pl_module: ...)``: each function gets what its hook gets.

    Raises:
        UnknownArgumentError: a name that is no hook.
    """

    def __init__(
        self,
        setup: _Hook = None,
        teardown: _Hook = None,
        on_fit_start: _Hook = None,
        on_fit_end: _Hook = None,
        on_sanity_check_start: _Hook = None,
        on_sanity_check_end: _Hook = None,
        on_train_batch_start: _Hook = None,
        on_train_batch_end: _Hook = None,
        on_train_epoch_start: _Hook = None,
        on_train_epoch_end: _Hook = None,
        on_validation_epoch_start: _Hook = None,
        on_validation_epoch_end: _Hook = None,
        on_test_epoch_start: _Hook = None,
        on_test_epoch_end: _Hook = None,
        on_validation_batch_start: _Hook = None,
        on_validation_batch_end: _Hook = None,
        on_test_batch_start: _Hook = None,
        on_test_batch_end: _Hook = None,
        on_train_start: _Hook = None,
        on_train_end: _Hook = None,
        on_validation_start: _Hook = None,
        on_validation_end: _Hook = None,
        on_test_start: _Hook = None,
        on_test_end: _Hook = None,
        on_exception: _Hook = None,
        on_save_checkpoint: _Hook = None,
        on_load_checkpoint: _Hook = None,
        on_before_backward: _Hook = None,
        on_after_backward: _Hook = None,
        on_before_optimizer_step: _Hook = None,
        on_before_zero_grad: _Hook = None,
        on_predict_start: _Hook = None,
        on_predict_end: _Hook = None,
        on_predict_batch_start: _Hook = None,
        on_predict_batch_end: _Hook = None,
        on_predict_epoch_start: _Hook = None,
        on_predict_epoch_end: _Hook = None,
        **more: _Hook,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "more", "__class__")}
        for name, function in {**given, **more}.items():
            if name not in _HOOKS:
                raise UnknownArgumentError(f"LambdaCallback has no hook {name!r}: {nearest(name, _HOOKS)}")
            if function is not None:
                setattr(self, name, function)
