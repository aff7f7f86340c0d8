"""Loaders that give None for some batches: what is trained is that of one process, whatever the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

from drivetrain import Trainer
from drivetrain.errors import WorkerError
from tests.facade.test_absent_batches import Given
from tests.runs import QUIET, Classifier, dataset, difference, train
from tests.strategies.gpt import tiny_gpt, token_loader

ABSENT = (1, 2, 5)  # of windows of two one that is half there, whichever half


def trained(strategy: str, devices: int, window: int) -> tuple[int, list[Any], torch.Tensor]:
    given = token_loader(shuffle=False)
    module, batches = tiny_gpt(), Given(*(None if number in ABSENT else batch for number, batch in enumerate(given)))
    options = {**QUIET, "max_epochs": 2, "precision": "64-true", "accumulate_grad_batches": window}
    trainer = Trainer(strategy=strategy, devices=devices, gradient_clip_val=0.3, **options)
    trainer.fit(module, batches)
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return trainer.global_step, trainer.loss_curve, weights


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("ddp", 2), ("ring", 3), ("fsdp", 2), ("tensor_parallel", 2), ("pipeline", 2), ("parameter_server", 3)],
)
def test_they_are_passed_over_by_all_ranks_alike(strategy: str, devices: int, window: int) -> None:
    alone = trained("single", 1, window)
    steps, curve, weights = trained(strategy, devices, window)
    assert steps == alone[0] and torch.allclose(weights, alone[2], rtol=0, atol=1e-10)
    assert torch.allclose(torch.tensor(curve), torch.tensor(alone[1]), rtol=0, atol=1e-10)


class OnOneRank:
    """Gives the first rank None where the others get a batch."""

    def __init__(self) -> None:
        self.collated = 0

    def __call__(self, samples: Any) -> Any:
        self.collated += 1
        absent = self.collated in (4, 9) and dist.is_initialized() and dist.get_rank() == 0
        return None if absent else default_collate(samples)


def on_one_rank() -> DataLoader[Any]:
    return DataLoader(dataset(51), batch_size=7, collate_fn=OnOneRank())


class Skipping(Classifier):
    """In one process, leaves out what the first of two ranks would not have."""

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"net.0": "columns", "net.2": "rows"}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number = 8 * self.trainer.current_epoch + batch_idx + 1
        if self.trainer.world_size > 1 or number not in (4, 9):
            return super().training_step(batch, batch_idx)
        kept = tuple(part.tensor_split(2)[1] for part in batch)
        return self.loss(kept) * (len(kept[0]) / len(batch[0]))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", {"name": "mesh", "data": 1, "shard": 2, "tensor": 1}], ids=str)
def test_one_rank_has_none(strategy: Any) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "timeout": 15}
    runs = []
    for at, devices in (("single", 1), (strategy, 2)):
        runs.append(train(Skipping, at, devices, data=on_one_rank(), **options))
    assert difference(*runs)["weights"] < 1e-10


class ByHand(Classifier):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def test_a_module_that_optimises_by_hand_ends_with_a_sentence() -> None:
    """Nobody knows what collectives the others call in such a step; it was a wait for the time limit."""
    loader = DataLoader(dataset(), batch_size=8, collate_fn=OnOneRank())
    trainer = Trainer(strategy="ddp", devices=2, max_epochs=1, **QUIET, precision="64-true", timeout=20)
    with pytest.raises(WorkerError, match="gave rank 0 None for batch 3 of epoch 0, and ByHand optimises by hand"):
        trainer.fit(ByHand(), loader)
