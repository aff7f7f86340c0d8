"""Optimizers that look at parameters together train as on one process, or are refused after their first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import TrainModule
from drivetrain.comm.communicator import Communicator
from drivetrain.errors import WorkerError
from drivetrain_plugins.strategies.first_step import FirstStep
from tests.runs import difference, loader, seeded, train

SERVER = "parameter_server"


class Looking(torch.optim.SGD):
    """Of each parameter that has a gradient, its mean size."""

    def sizes(self, group: dict[str, Any]) -> list[float]:
        return [p.grad.abs().sum().item() for p in group["params"] if p.grad is not None]

    def before(self) -> None:
        raise NotImplementedError

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.before()
        return super().step()


class OfAll(Looking):
    """As Prodigy does: one number of all parameters, in every group."""

    def before(self) -> None:
        total = sum(sum(self.sizes(group)) for group in self.param_groups)
        for group in self.param_groups:
            group["d"] = total
            group["lr"] = 0.1 / (1.0 + total)


class AsTensor(Looking):
    """The same as a tensor in a state of its own."""

    def before(self) -> None:
        total = sum(sum(self.sizes(group)) for group in self.param_groups)
        self.state["seen"] = {"d": torch.tensor(total)}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(1.0 + total)


class OfGroups(Looking):
    """One number of each group; zero where it has no gradients."""

    def before(self) -> None:
        for group in self.param_groups:
            group["size"] = sum(self.sizes(group))
            group["lr"] = 0.1 / (1.0 + group["size"])


class OfEach(Looking):
    """One number of each parameter, and counts that differ: of those that have gradients."""

    def before(self) -> None:
        for group in self.param_groups:
            if self.sizes(group):
                group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    size = p.grad.abs().sum().item()
                    self.state[p]["size"] = size
                    self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                    p.grad.div_(1.0 + size)


class Net(TrainModule):
    """``split``: a group for each half of the network. ``frozen``: the first half has no gradients."""

    def __init__(self, kind: type[torch.optim.SGD], split: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.kind, self.split = kind, split
        self.net = seeded(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        )
        if frozen:
            self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {"net.0": "columns", "net.2": "rows"}

    def configure_optimizers(self) -> Any:
        first = [p for block in self.net[:2] for p in block.parameters()]
        rest = [p for block in self.net[2:] for p in block.parameters()]
        groups = [{"params": first}, {"params": rest}] if self.split else first + rest
        return self.kind(groups, lr=0.1, momentum=0.9)


PIPELINE: list[tuple[Any, int]] = [
    ("pipeline", 2),
    ({"name": "mesh", "data": 1, "shard": 1, "tensor": 1, "pipeline": 2}, 2),
]
SERVERS: list[tuple[Any, int]] = [
    ({"name": SERVER, "servers": 2}, 3),
    ({"name": SERVER, "servers": 2, "mode": "async"}, 4),
]
SHARDS: list[tuple[Any, int]] = [
    ("fsdp", 2),
    ("tensor_parallel", 2),
    ({"name": "zero", "stage": 1}, 2),
    ({"name": "zero", "stage": 3}, 2),
]


def fit(strategy: Any, devices: int, *what: Any) -> Any:
    zero = isinstance(strategy, dict) and strategy["name"] == "zero"
    options = {"max_epochs": 1, "max_steps": 3, "precision": "32-true" if zero else "64-true"}
    return train(lambda: Net(*what), strategy, devices, data=loader(24, 8), **options)


@pytest.mark.parametrize("kind", [OfAll, AsTensor])
@pytest.mark.parametrize(("strategy", "devices"), PIPELINE + SERVERS + SHARDS)
def test_what_is_of_all_parameters_is_refused(strategy: Any, devices: int, kind: type[Looking]) -> None:
    place = r"param_groups\[0\]\['(lr|d)'\]" if kind is OfAll else r"state\['seen'\]\['d'\]"
    said = rf"{kind.__name__} keeps something beside .*\({place} is \S+ on (rank|server) 0 and .* strategy=ddp"
    with pytest.raises(WorkerError, match=said):
        fit(strategy, devices, kind)


@pytest.mark.parametrize(("strategy", "devices"), PIPELINE)
def test_a_group_without_parameters_here_can_tell_of_all(strategy: Any, devices: int) -> None:
    with pytest.raises(WorkerError, match=r"OfAll keeps something beside .*param_groups\[0\]"):
        fit(strategy, devices, OfAll, True)


@pytest.mark.parametrize(("strategy", "devices"), [*PIPELINE, SERVERS[0], SHARDS[0]])
def test_what_is_of_a_group_is_refused_where_several_have_parts_of_it(strategy: Any, devices: int) -> None:
    with pytest.raises(WorkerError, match=r"OfGroups keeps something beside .*'(size|lr)'"):
        fit(strategy, devices, OfGroups)


def test_a_group_of_cut_and_whole_parameters() -> None:
    with pytest.raises(WorkerError, match=r"OfGroups makes one number .*'(size|lr)'.* strategy=ddp"):
        fit("tensor_parallel", 2, OfGroups)


class Warms(Looking):
    """Counts in each group that has gradients, as a number or in place, and warms up by it."""

    kept: Any = 0

    def before(self) -> None:
        for group in self.param_groups:
            if self.sizes(group):
                group["k"] = group.get("k", self.kept) + 1
                group["n"] += 1
                group["lr"] = 0.02 * min(max(float(group["k"]), float(group["n"])), 5.0)

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            group["n"] = torch.zeros(())


class WholeFrozen(Net):
    """What is not cut, or what is, has no gradients."""

    def __init__(self, kind: type[torch.optim.SGD], frozen: str) -> None:
        super().__init__(kind)
        for name, parameter in self.named_parameters():
            if frozen == ("cut" if name in ("net.0.weight", "net.0.bias", "net.2.weight") else "whole"):
                parameter.requires_grad_(False)


@pytest.mark.parametrize("frozen", ["none", "whole", "cut"])
def test_counts_of_a_group_of_cut_and_whole_parameters(frozen: str) -> None:
    def fit(strategy: Any, devices: int) -> Any:
        options: dict[str, Any] = {"max_epochs": 2, "precision": "64-true"}
        return train(lambda: WholeFrozen(Warms, frozen), strategy, devices, data=loader(24, 8), **options)

    assert max(difference(fit("tensor_parallel", 2), fit("single", 1)).values()) < 1e-10


@pytest.mark.parametrize("strategy", ["fsdp", "tensor_parallel", {"name": "zero", "stage": 1}])
def test_what_is_of_a_parameter_is_refused_where_several_have_parts_of_it(strategy: Any) -> None:
    with pytest.raises(WorkerError, match=r"OfEach keeps something beside .*'size'"):
        fit(strategy, 2, OfEach)


@pytest.mark.parametrize(("strategy", "devices"), [*PIPELINE, ({"name": SERVER, "servers": 2}, 3), ("ddp", 2)])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_numbers_that_may_differ(strategy: Any, devices: int, split: bool, frozen: bool) -> None:
    found = difference(fit(strategy, devices, OfEach, split, frozen), fit("single", 1, OfEach, split, frozen))
    assert max(found.values()) < 1e-10


@pytest.mark.parametrize(("strategy", "devices"), PIPELINE)
def test_groups_that_a_rank_has_alone(strategy: Any, devices: int) -> None:
    found = difference(fit(strategy, devices, OfGroups, True), fit("single", 1, OfGroups, True))
    assert max(found.values()) < 1e-10


class Momentum(torch.optim.Optimizer):
    """An optimizer of one's own that keeps a tensor of each parameter's shape."""

    def __init__(self, params: Any, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.sub_(kept.mul_(group["momentum"]).add_(p.grad), alpha=group["lr"])
        return loss


class TwoWeights(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(lambda: nn.Linear(2, 1, bias=False))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0][:, :2]).square().mean()

    def configure_optimizers(self) -> Any:
        return Momentum(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("stage", [1, 3])
def test_states_of_a_part_that_is_one_weight(stage: int) -> None:
    def fit(strategy: Any, devices: int) -> Any:
        return train(TwoWeights, strategy, devices, data=loader(24, 8), max_epochs=1, precision="32-true")

    found = difference(fit({"name": "zero", "stage": stage}, 2), fit("single", 1))
    assert max(found.values()) < 1e-6


class Counts(Communicator):
    """Two ranks that say the same."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size, self.asked = 2, 0

    def all_gather_plain(self, data: Any) -> list[Any]:
        self.asked += 1
        return [data, data]


@pytest.mark.parametrize(("kind", "asked"), [(torch.optim.SGD, 0), (OfAll, 1)])
def test_asked_once_and_never_for_torchs_own(kind: type[torch.optim.SGD], asked: int) -> None:
    communicator = Counts()
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = kind([weight], lr=0.1)
    first = FirstStep(communicator, "strategy=pipeline", lambda _: {id(weight): "weight"}, of_all=False)

    def step() -> bool:
        optimizer.step()
        return True

    assert not first.step(optimizer, lambda: False)  # one that is skipped tells nothing
    for _ in range(3):
        assert first.step(optimizer, step)
    assert communicator.asked == asked
