"""Where the caller's module lies after a stage that a lone worker ran on another device."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.strategy import Strategy
from drivetrain_plugins.strategies import SINGLE
from tests.runs import Classifier


class Elsewhere:
    """Stands for a GPU: whatever the module is moved to it, it is said to have come from there."""

    type = "cuda"


def test_module_and_optimizers_are_given_back() -> None:
    module: Any = Classifier()
    strategy = Strategy(None, SINGLE.support)
    strategy.prepare(module, "fit")
    optimizer = torch.optim.Adam(module.parameters())
    module.net[0].weight.grad = torch.ones_like(module.net[0].weight)
    optimizer.step()
    moved: list[Any] = []
    module.to = moved.append
    strategy.give_back([optimizer])
    assert moved == [], "it is where it was"
    strategy.device = Elsewhere()  # type: ignore[assignment]
    strategy.give_back([optimizer])
    assert moved == [torch.device("cpu")]
    strategy._came_from = torch.device("meta")
    strategy.give_back([optimizer])
    assert moved == [torch.device("cpu")], "what was made here stays"
