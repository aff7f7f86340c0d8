"""Mixed precision: parameters in fp32, arithmetic in a 16-bit format where that is safe, chosen by autocast.

Loss scaling for fp16 follows Micikevicius et al., "Mixed Precision Training" (2018); the dynamic scale is that of
``torch.amp.GradScaler``: halved after a step with a gradient that is not finite, doubled after 2000 without.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from drivetrain.errors import ConfigurationError, nearest
from drivetrain.precision import Precision
from drivetrain_plugins.precision.conversion import cast_floating, refuse_loss_scale

DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class MixedPrecision(Precision):
    """``bf16-mixed`` (autocast alone) and ``16-mixed`` (autocast and a loss scale).

    Every rank has its own scaler and no rank asks another: gradients are checked after they were reduced, so an
    ``inf`` or ``nan`` of one rank is in the sum that all ranks read. All skip the same steps and keep the same scale.
    That holds where each rank reads whole gradients; a strategy that shards them must agree on the check itself.

    The scale may change only at the first loss after a step, so optimizers whose losses were all scaled before the
    first of them stepped (manual optimisation) are unscaled by the number they were scaled with.

    Args:
        name: ``"bf16-mixed"`` or ``"16-mixed"``.
        loss_scale: a number keeps the scale at it; ``None`` or ``"dynamic"`` starts at 65536 and adapts.

    Raises:
        ConfigurationError: for another name, a scale that is not a positive number, or a scale for bf16.
    """

    def __init__(self, name: str = "bf16-mixed", loss_scale: float | str | None = None) -> None:
        if name not in DTYPES:
            raise ConfigurationError(f"there is no mixed precision {name!r}: {nearest(name, DTYPES)}")
        super().__init__(name, loss_scale)
        self.dtype = DTYPES[name]
        self.static: float | None = None
        if self.scales:
            self.static = _static_scale(loss_scale)
        else:
            refuse_loss_scale(name, loss_scale)
        self._device_type = "cpu"
        self._scaler: GradScaler | None = None
        self._saved: dict[str, Any] | None = None
        self._scaled = False  # whether the scaler has seen a loss: before that there is nothing to undo
        self._unscaled: dict[int, list[torch.Tensor]] = {}  # by id(optimizer): inf counts since the last update
        self._stepped = False  # whether the scale is to be updated before the next loss

    @property
    def scales(self) -> bool:
        return self.dtype is torch.float16

    @property
    def current_scale(self) -> float:
        """The loss scale as a number (waits for the device); 1.0 where nothing is scaled."""
        return self._grad_scaler().get_scale() if self.scales else 1.0

    def connect(self, device: torch.device) -> None:
        self._device_type = device.type
        self._scaler = None

    def _grad_scaler(self) -> GradScaler:
        if self._scaler is None:
            self._scaler = GradScaler(self._device_type, init_scale=self.static or 2.0**16)
            if self._saved is not None:
                self._scaler.load_state_dict(self._saved)
                self._saved = None
        return self._scaler

    def convert_input(self, batch: Any) -> Any:
        return cast_floating(batch, torch.float32)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return DTYPES[self.name]

    def forward_context(self) -> AbstractContextManager[Any]:
        # A weight cast in no_grad, as for a target network, would be what the loss is computed with: without gradients.
        return torch.autocast(self._device_type, self.dtype, cache_enabled=False)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        if not self.scales:
            return loss
        self._update()
        self._scaled = True
        return self._grad_scaler().scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale; a second call before the next loss does nothing."""
        if not self._scaled or id(optimizer) in self._unscaled:
            return
        scaler = self._grad_scaler()
        scaler.unscale_(optimizer)
        # The counts live on the device; reading them waits for it, which only `step` must do.
        self._unscaled[id(optimizer)] = list(scaler._found_inf_per_device(optimizer).values())

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        if not self.scales:
            return super().step(optimizer, closure)
        if closure is not None:
            raise ConfigurationError(
                f"precision={self.name} cannot step {type(optimizer).__name__} with a closure, as the loss scale must"
                " be undone between backward and step: use precision=bf16-mixed or an optimizer without closures."
            )
        self.unscale(optimizer)
        self._stepped = True
        # Not `GradScaler.step`: it does not say whether it stepped without a second wait for the device.
        if any(count.item() for count in self._unscaled.get(id(optimizer), [])):
            return False
        optimizer.step()
        return True

    def _update(self) -> None:
        """Adapt the scale to the steps since the last loss."""
        if not self._stepped:
            return
        self._stepped = False
        scaler = self._grad_scaler()
        if any(self._unscaled.values()):
            scaler.update(self.static)
        else:  # no optimizer had a gradient, so nothing was checked: `update` would refuse
            scaler._per_optimizer_states.clear()
        self._unscaled.clear()

    def state_dict(self) -> dict[str, Any]:
        if not self.scales:
            return {}
        self._update()
        return {"scaler": self._grad_scaler().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale; a state without one (saved in another precision) leaves it as it is."""
        if not self.scales or "scaler" not in state:
            return
        self._scaler, self._saved, self._scaled, self._stepped = None, dict(state["scaler"]), False, False
        self._unscaled.clear()
        if self.static is not None:
            self._saved["scale"] = self.static


def _static_scale(loss_scale: float | str | None) -> float | None:
    if loss_scale is None or loss_scale == "dynamic":
        return None
    try:
        value = float(loss_scale)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise ConfigurationError(f"loss_scale={loss_scale!r} is not a scale: give a positive number or 'dynamic'.")
    return value
