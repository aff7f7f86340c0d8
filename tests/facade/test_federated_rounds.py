"""Federated rounds under Lightning's meanings: clients of a rank make steps that other ranks do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drivetrain.lightning as ours
from drivetrain.errors import WorkerError
from drivetrain.lightning.pytorch.callbacks import ModelCheckpoint
from tests.runs import loader, seeded

QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Module(ours.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(lambda: nn.Linear(6, 4)).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Gathers(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.all_gather(torch.ones(1))
        return super().training_step(batch, batch_idx)


class Saves(Module):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.save_checkpoint("never.ckpt")


def fit(module: Module, **options: Any) -> Any:
    """Three clients of two batches each on two ranks: one rank has two of them."""
    strategy = {"name": "federated", "clients": 3}
    trainer = ours.Trainer(strategy=strategy, devices=2, accelerator="cpu", **{**QUIET, **options})
    trainer.fit(module, loader(48))
    return trainer


def test_a_round_is_one_step_on_every_rank() -> None:
    trainer = fit(Module(), max_steps=5, max_epochs=50, enable_checkpointing=False)
    assert (trainer.global_step, trainer.current_epoch) == (5, 5)


def test_checkpoints_are_made_between_rounds(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    fit(Module(), max_epochs=3, callbacks=[saver])
    assert {path.name for path in tmp_path.iterdir()} == {f"step={number}.ckpt" for number in (1, 2, 3)}


@pytest.mark.parametrize(("make", "what"), [(Gathers, "all_gather"), (Saves, "save_checkpoint")])
def test_what_waits_for_other_ranks_is_refused_while_a_client_trains(make: type[Module], what: str) -> None:
    with pytest.raises(WorkerError, match=f"{what} is called in the training of a client"):
        fit(make(), max_epochs=1, enable_checkpointing=False)
