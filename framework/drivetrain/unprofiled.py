"""What torch's optimizers do without the entries that they make for a profiler.

Torch wraps ``step`` and ``zero_grad`` in a record for a profiler and in lists of hooks. Of a very short step this is a
fifth. Where no profiler looks and no hook is registered, only their effect is left here; wherever a method is not
torch's own, it is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torchs


def zero_grad(optimizer: Optimizer) -> None:
    """``optimizer.zero_grad()``."""
    if (
        getattr(type(optimizer), "zero_grad", None) is not _ZERO_GRAD
        or "zero_grad" in vars(optimizer)
        or torch.autograd._profiler_enabled()
    ):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def step(optimizer: Optimizer) -> None:
    """``optimizer.step()``."""
    function: Any = getattr(type(optimizer), "step", None)
    noted = vars(optimizer)
    if (
        getattr(function, "__code__", None) is not _RECORDED
        or "step" in noted  # a learning-rate scheduler counts there
        or noted.get("_optimizer_step_pre_hooks", True)
        or noted.get("_optimizer_step_post_hooks", True)
        or any(_GLOBAL_HOOKS)
        or torch.autograd._profiler_enabled()
    ):
        optimizer.step()
        return
    function.__wrapped__(optimizer)


def _recorded() -> Any:
    """The code that is the same in every ``step`` that torch has wrapped, whatever is within. (A name or a mark of the
    function would be copied by whoever wraps it once more.)"""

    def within(optimizer: Optimizer) -> None: ...

    wrap: Callable[..., Any] = Optimizer.profile_hook_step
    return wrap(within).__code__


_ZERO_GRAD = Optimizer.zero_grad  # as it is before anybody puts another in its place, for all optimizers at once
_RECORDED = _recorded()
_GLOBAL_HOOKS = (torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks)
