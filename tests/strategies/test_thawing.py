"""Parameters that the step itself thaws, whose first gradients no bucket of DDP has a place for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runs import Classifier, difference, train


class Thaws(Classifier):
    """Frozen in part until the step of the fourth batch, which thaws it before its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            self.net[0].requires_grad_(True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 2), ("ring", 3)])
def test_what_the_step_thaws_is_averaged_at_once(strategy: str, devices: int, window: int) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": window, "gradient_clip_val": 0.5}
    run = train(Thaws, strategy, devices, **options)
    alone = train(Thaws, **options)
    assert max(difference(alone, run).values()) < 1e-10
