"""Loaders that give None for some batches: what is trained is that of one process, whatever the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain import Trainer
from tests.facade.test_absent_batches import Given
from tests.runs import QUIET
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
