"""Parameters that cannot be cut as they are, and hooks on gradients: trained as on one process, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.errors import ConfigurationError, WorkerError
from tests.runs import Classifier, difference, seeded, train
from tests.strategies.features import Planned

LAYERS = {"name": "fsdp", "wrap": "Linear"}
SHARDS = {"name": "mesh", "data": 1, "shard": 2, "tensor": 1}
STAGE_3 = {"name": "zero", "stage": 3}


class Tempered(Planned):
    """With a temperature, as contrastive losses have one."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.2))

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]) * self.temperature.exp(), batch[1])


class ChannelsLast(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(
            lambda: nn.Sequential(
                nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 4, (3, 1)), nn.Tanh(), nn.Flatten(), nn.Linear(4, 4)
            )
        ).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("make", [Tempered, ChannelsLast])
def test_zero_trains_parameters_of_any_shape(make: Any, stage: int) -> None:
    few: dict[str, Any] = {"max_steps": 6, "precision": "32-true"}
    one, two = train(make, **few), train(make, {"name": "zero", "stage": stage}, 2, **few)
    assert max(difference(one, two).values()) < 2e-6


@pytest.mark.parametrize("strategy", [LAYERS, SHARDS, STAGE_3], ids=["fsdp", "mesh", "zero"])
@pytest.mark.parametrize(
    ("make", "said"),
    [(Tempered, "temperature is a single number"), (ChannelsLast, r"net\.1\.weight does not lie in memory row")],
)
def test_what_cannot_be_cut_is_refused_before_launch(make: Any, said: str, strategy: Any) -> None:
    if make is ChannelsLast:
        strategy = {key: value for key, value in strategy.items() if key != "wrap"}
    with pytest.raises(ConfigurationError, match=said):
        train(make, strategy, 2, precision="32-true")


def half(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


class Hooked(Planned):
    """``when`` it hooks: at first, in ``setup``, or when training starts."""

    when = "init"

    def __init__(self) -> None:
        super().__init__()
        self._hook("init")

    def setup(self, stage: str) -> None:
        self._hook("setup")

    def on_train_start(self) -> None:
        self._hook("start")

    def _hook(self, now: str) -> None:
        if now == self.when:
            self.net[0].weight.register_hook(half)


class HookedInSetup(Hooked):
    when = "setup"


class HookedLate(Hooked):
    when = "start"


@pytest.mark.parametrize("strategy", [LAYERS, SHARDS, "tensor_parallel"], ids=["fsdp", "mesh", "tensor_parallel"])
@pytest.mark.parametrize("make", [Hooked, HookedInSetup, HookedLate])
def test_a_hook_on_a_gradient_is_called_or_refused(make: type[Hooked], strategy: Any) -> None:
    if make is HookedLate and strategy == "tensor_parallel":
        assert max(difference(train(make), train(make, strategy, 2)).values()) < 1e-10
        return
    refused = ConfigurationError if make is Hooked else (ConfigurationError, WorkerError)
    with pytest.raises(refused, match=r"net\.0\.weight .* hook on its gradient \(register_hook\)"):
        train(make, strategy, 2, max_steps=2)


@pytest.mark.parametrize("strategy", ["ddp", "pipeline", STAGE_3], ids=["ddp", "pipeline", "zero"])
def test_where_parameters_stay_a_hook_is_called(strategy: Any) -> None:
    few: dict[str, Any] = {"max_steps": 6, "precision": "32-true" if strategy is STAGE_3 else "64-true"}
    bound = 2e-6 if strategy is STAGE_3 else 1e-10
    assert max(difference(train(Hooked, **few), train(Hooked, strategy, 2, **few)).values()) < bound
