"""What compression keeps from step to step, by parameter: nothing counts before the optimizer has stepped."""

from __future__ import annotations

from typing import Any

import torch


class StepMemory:
    """Fulfils :class:`drivetrain.compressor.Memory`. Values are replaced, never changed, so that a step that is
    skipped can be undone; that costs the memory of one more copy between backward and step.

    Attributes:
        step: optimizer steps taken.
    """

    def __init__(self) -> None:
        self.step = 0
        self._kept: dict[tuple[str, str], torch.Tensor] = {}
        self._pending: dict[tuple[str, str], torch.Tensor] = {}

    def get(self, kind: str, name: str) -> torch.Tensor | None:
        key = (kind, name)
        return self._pending[key] if key in self._pending else self._kept.get(key)

    def put(self, kind: str, name: str, value: torch.Tensor) -> None:
        self._pending[kind, name] = value

    def settle(self, stepped: bool) -> None:
        """The step is over: what it put is kept if it was taken, forgotten if it was skipped."""
        if stepped:
            self._kept.update(self._pending)
            self.step += 1
        self._pending.clear()

    def state_dict(self) -> dict[str, Any]:
        """``{"step": int, "kept": {kind: {name: tensor}}}`` as of the last step that was taken."""
        kept: dict[str, dict[str, torch.Tensor]] = {}
        for (kind, name), value in self._kept.items():
            kept.setdefault(kind, {})[name] = value
        return {"step": self.step, "kept": kept}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.step = int(state["step"])
        self._pending.clear()
        # Copies: a bucket's parameters share one tensor, which a checkpoint may bring back as views of a larger one.
        self._kept = {
            (kind, name): value.to(device, copy=True)
            for kind, values in state["kept"].items()
            for name, value in values.items()
        }
