"""What moves between the host and a device, seen through tensors that only note how they are asked to move."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain.data_hooks import move
from drivetrain.strategy import Strategy
from drivetrain_plugins.strategies import SINGLE
from tests.runs import Classifier


class Noting(torch.Tensor):
    """Keeps what ``to`` was called with."""

    asked: list[Any]

    def to(self, device: Any, **options: Any) -> Any:  # type: ignore[override]
        self.asked.append([device.type, options])
        return self


@pytest.mark.parametrize(("device", "waits"), [("cpu", True), ("cuda", False)])
def test_what_a_device_still_writes_is_waited_for(device: str, waits: bool) -> None:
    tensor = torch.ones(2).as_subclass(Noting)
    tensor.asked = []
    assert move({"rows": [tensor]}, torch.device(device))["rows"][0] is tensor
    assert tensor.asked == [[device, {"non_blocking": not waits}]]


def test_module_and_optimizers_are_given_back() -> None:
    module: Any = Classifier().to(torch.float64)
    strategy = Strategy(None, SINGLE.support)
    strategy.prepare(module, "fit")
    optimizer = torch.optim.Adam(module.parameters())
    moved: list[str] = []
    module.cpu = lambda: moved.append("module")
    optimizer.state["parameter"] = {"seen": torch.ones(1), "steps": 3}
    strategy.give_back([optimizer])
    assert moved == [], "it never left"
    strategy.device = torch.device("meta")  # stands for a GPU
    optimizer.state["parameter"]["seen"] = held = torch.ones(1)
    strategy.give_back([optimizer])
    assert moved == ["module"]
    assert optimizer.state["parameter"] == {"seen": held, "steps": 3} and held.device.type == "cpu"
