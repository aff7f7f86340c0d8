"""Callbacks that one rank alone has, as of a script that each rank runs: the others do not wait for its hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import drivetrain.lightning as L
from tests.runs import QUIET, loader, seeded


class Seen(L.Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda trainer, module: module.seen.append(dict(trainer.callback_metrics)))


class Module(L.LightningModule):
    def __init__(self, hook: str, rank: int) -> None:
        super().__init__()
        self.net = seeded(lambda: nn.Linear(6, 4).double())
        self.hook, self.rank, self.seen = hook, rank, []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def configure_callbacks(self) -> list[L.Callback]:
        return [Seen(self.hook)] if self.trainer.global_rank == self.rank else []


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_epoch_end", "on_validation_end"])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_do_not_wait_for_hooks_of_another_ranks_callback(hook: str, rank: int) -> None:
    module = Module(hook, rank)
    trainer = L.Trainer(strategy="ddp", devices=2, max_epochs=2, **QUIET)
    trainer.fit(module, loader(48, 4), loader(16, 4, False))
    assert trainer.global_step == 12
    assert set(trainer.callback_metrics) == {"train/loss", "train/loss_step", "train/loss_epoch", "val/loss"}
    if rank == 0:
        assert "val/loss" in module.seen[-1]
