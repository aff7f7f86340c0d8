"""Parameters that some steps, or some ranks in a step, do not use, where gradients are reduced in shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.errors import WorkerError
from tests.runs import Classifier, dataset, difference, seeded, train


class Experts(Classifier):
    """Two of one shape; only those that a sample goes to are called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = seeded(lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"net.0": "columns", "net.2": "rows"}

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        scores, first = self.net(x), x[:, 0] > 0
        for chosen, expert in zip((first, ~first), self.experts, strict=True):
            if chosen.any():
                scores = torch.where(chosen[:, None], expert(scores), scores)
        return nn.functional.cross_entropy(scores, y)


class SteppedByHand(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class InTurn(Experts):
    """Every rank uses the same expert in a step, and none in some; another layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = seeded(lambda: nn.Linear(2, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self.net(x)
        if batch_idx % 3 < 2:
            scores = self.experts[batch_idx % 3](scores)
        return nn.functional.cross_entropy(scores, y)


def parted(batch_size: int = 2, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    """The samples go to the first expert and to the second by turns: of a batch of two on two ranks each rank uses one
    expert, and of a batch of three one rank uses both."""
    x, y = (tensor[:16] for tensor in dataset().tensors)
    x[::2, 0], x[1::2, 0] = x[::2, 0].abs() + 0.1, -x[1::2, 0].abs() - 0.1
    return DataLoader(TensorDataset(x.to(dtype), y), batch_size=batch_size)


SHARDED = [("fsdp", 2), ({"name": "mesh", "shard": 2, "tensor": 2}, 4)]


@pytest.mark.parametrize(("strategy", "devices"), SHARDED, ids=str)
def test_ranks_that_use_different_parameters_are_refused(strategy: Any, devices: int) -> None:
    with pytest.raises(WorkerError, match=r"experts\.0\.weight.* on some ranks only.*find_unused_parameters"):
        train(Experts, strategy, devices, data=parted())


def test_they_are_refused_where_the_module_steps_itself() -> None:
    with pytest.raises(WorkerError, match=r"experts\.0\.weight.* on some ranks only.*find_unused_parameters"):
        train(SteppedByHand, "fsdp", 2, data=parted())


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_refuses_what_a_pass_does_not_reach(stage: int) -> None:
    with pytest.raises(WorkerError, match=r"without a gradient on rank .*experts\..*find_unused_parameters"):
        train(Experts, {"name": "zero", "stage": stage}, 2, data=parted(dtype=torch.float32), precision="32-true")


@pytest.mark.parametrize("windows", [1, 2])
def test_what_no_rank_uses_is_left_as_it_is(windows: int) -> None:
    alone, sharded = (
        train(InTurn, strategy, devices, accumulate_grad_batches=windows)
        for strategy, devices in (("single", 1), ("fsdp", 3))
    )
    assert max(difference(alone, sharded).values()) < 1e-10
