"""Precision: in which number format the module computes. A strategy composes one; the loops never call it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain import unprofiled

NO_CONTEXT: AbstractContextManager[Any] = nullcontext()  # what forward_context returns when there is nothing to do


class Precision:
    """Base class and fp32 in one: every method here is the identity.

    Attributes:
        name: the registered name, for example ``"bf16-mixed"``.
        precision: the same, by Lightning's word for it.
        loss_scale: static loss scale, or ``None`` for the default of the format.
    """

    name: str = "32-true"  # also of a subclass that leaves out super().__init__, as one of Lightning's may
    precision: str = "32-true"
    loss_scale: float | str | None = None

    def __init__(self, name: str = "32-true", loss_scale: float | str | None = None) -> None:
        self.name = self.precision = name
        self.loss_scale = loss_scale

    def connect(self, device: torch.device) -> None:
        """Learn the device before anything is built."""

    def init_context(self) -> AbstractContextManager[Any]:
        """Around the building of the module, for formats that change the default dtype."""
        return nullcontext()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """The module with its parameters in the format's dtype (in place)."""
        return module

    def convert_input(self, batch: Any) -> Any:
        """The batch with its floating-point tensors in the format's dtype."""
        return batch

    def forward_context(self) -> AbstractContextManager[Any]:
        """Around every forward pass."""
        return NO_CONTEXT

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that ``backward`` is called on."""
        return loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring the optimizer's gradients back to their true size; called once per step, before clipping."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Step the optimizer; ``False`` when the step was skipped because a gradient was not finite."""
        unprofiled.step(optimizer) if closure is None else optimizer.step(closure=closure)
        return True

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype that matrices are multiplied in where it is not that of the parameters: a strategy that gathers
        weights right before they are used can send them in it."""
        return None

    @property
    def scales(self) -> bool:
        """Whether losses are scaled, so that the closure must run before the optimizer's own step."""
        return False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
