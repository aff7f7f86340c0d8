"""What an optimizer keeps beside the states of parameters goes on from a checkpoint, whoever holds the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader

from drivetrain import Trainer, TrainModule
from drivetrain.errors import ConfigurationError, WorkerError
from tests.resume.runs import differences, end, fit
from tests.resume.test_optimizers import Counting, Slow, Wrapping
from tests.runs import QUIET, loader, seeded


class InGroups(torch.optim.SGD):
    """Counts steps in its parameter groups, as schedule-free optimizers do."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["lr"] = 0.1 / (1 + group["k"])
        return super().step(closure)


class OfItsOwn(torch.optim.SGD):
    """Keeps what is made of all the parameters that it has, as Prodigy keeps a distance."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        norms = [float(p.detach().norm()) for group in self.param_groups for p in group["params"]]
        self.state["seen"] = {"norms": sum(norms)}
        return super().step(closure)


class Plain(TrainModule):
    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.kind = kind
        self.net = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {"net.0": "columns", "net.2": "rows"}

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.1, momentum=0.9)


def run(
    folder: Path, kind: type[torch.optim.Optimizer], *moments: str, devices: int = 2, **options: Any
) -> dict[str, Any]:
    """Four steps; what the first rank ends with."""
    settings = {"max_epochs": 1, "validation": False, "accumulate_grad_batches": 1, **options}
    data: DataLoader[Any] = loader(16, 4)
    fit(folder, *moments, module=Plain(kind), data=data, devices=devices, **settings)
    return end(folder, 0, devices)


def parts(state: dict[str, Any]) -> list[Any]:
    return [state["state_dict"], state["optimizer_states"]]


def assert_close(a: dict[str, Any], b: dict[str, Any], atol: float) -> None:
    ours, theirs = (tree_flatten(parts(state)) for state in (a, b))
    assert ours[1] == theirs[1]
    for one, other in zip(ours[0], theirs[0], strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=atol)
        else:
            assert one == pytest.approx(other, abs=atol)


def gone_on(folder: Path, kind: type[torch.optim.Optimizer], **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run ended with, and what the run from its second step on."""
    whole = run(folder / "whole", kind, "batch", **options)
    return whole, run(folder / "resumed", kind, resume=folder / "whole" / "2-batch-0.ckpt", **options)


SERVER = "parameter_server"


@pytest.mark.parametrize("strategy", ["pipeline", "fsdp", "tensor_parallel", "local_sgd", "gossip", SERVER])
def test_the_same_bits(strategy: str, tmp_path: Path) -> None:
    whole, resumed = gone_on(tmp_path, Counting, strategy=strategy)
    assert whole["optimizer_states"][0]["beside"]["count"].item() == 4
    found = differences(parts(whole), parts(resumed))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", [InGroups, Slow, Wrapping])
def test_on_one_server(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    single = run(tmp_path / "single", kind, strategy="single", devices=1)
    whole, resumed = gone_on(tmp_path, kind, strategy={"name": SERVER, "embedded": True})
    assert not differences(parts(whole), parts(resumed))
    assert_close(whole, single, 1e-10)


@pytest.mark.parametrize("kind", [Counting, InGroups])
def test_counts_go_on_with_another_number_of_servers(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", kind, "batch", strategy={"name": SERVER, "servers": 2}, devices=3)
    saved = tmp_path / "whole" / "2-batch-0.ckpt"
    for strategy, devices in ((SERVER, 2), ("single", 1)):
        found = run(tmp_path / str(devices), kind, resume=saved, strategy=strategy, devices=devices)
        assert_close(found, whole, 1e-10)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("devices", [1, 2])
def test_zero(devices: int, stage: int, tmp_path: Path) -> None:
    options = {"strategy": {"name": "zero", "stage": stage}, "devices": devices, "precision": "32-true"}
    whole, resumed = gone_on(tmp_path, Counting, **options)
    assert whole["optimizer_states"][0]["beside"]["count"].item() == 4
    assert_close(whole, resumed, 1e-6)


@pytest.mark.parametrize(
    ("strategy", "devices"), [("pipeline", 2), ({"name": "zero"}, 2), ({"name": SERVER, "servers": 2}, 3)]
)
def test_what_is_of_several_ranks_together_is_refused(strategy: Any, devices: int, tmp_path: Path) -> None:
    options = {"strategy": strategy, "devices": devices, "precision": "32-true", "max_steps": 1}
    with pytest.raises(WorkerError, match=r"OfItsOwn keeps something beside .* strategy=ddp"):
        run(tmp_path / "own", OfItsOwn, **options)
    with pytest.raises(ConfigurationError, match=r"Slow\.state_dict\(\) has parts of its own \(slow\).*strategy=ddp"):
        run(tmp_path / "slow", Slow, **options)


@pytest.mark.parametrize("strategy", ["fsdp", "tensor_parallel"])
def test_shards_beside_are_refused(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"Slow keeps tensors beside the states of parameters .* strategy=ddp"):
        run(tmp_path, Slow, strategy=strategy, max_steps=1)


def test_a_lone_zero_worker_gives_back_what_was_counted() -> None:
    trainer = Trainer(strategy="zero", devices=1, max_epochs=1, precision="32-true", **QUIET)
    module = Plain(Counting)
    trainer.fit(module, loader(16, 4))
    (optimizer,) = trainer.optimizers
    assert optimizer.state["count"].item() == 4
    assert all(len(optimizer.state[p]) == 1 for p in module.parameters())
