"""A torchmetrics metric that was resumed in mid-epoch holds the whole epoch's samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torchmetrics

from tests.runs import Classifier, loader, train


class Measured(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.mean_loss = torchmetrics.MeanMetric()
        self.scores = torchmetrics.CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.mean_loss(loss, weight=len(batch[0]))
        self.scores(loss.detach())
        self.log("mean_loss", self.mean_loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("scores", self.scores.compute().sum())
        self.scores.reset()


def test_the_epoch_is_whole(tmp_path: Path) -> None:
    undisturbed = train(Measured, max_epochs=1)
    saved: list[Path] = []

    class Saves(Measured):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and not saved:
                saved.append(tmp_path / "mid.ckpt")
                self.trainer.save_checkpoint(saved[0])

    train(Saves, max_epochs=1)
    resumed = train_from(tmp_path / "mid.ckpt")
    assert resumed["mean_loss"] == undisturbed.metrics["mean_loss"]
    assert resumed["scores"] == undisturbed.metrics["scores"]


def train_from(path: Path) -> dict[str, float]:
    from drivetrain import Trainer
    from tests.runs import QUIET

    trainer = Trainer(strategy="single", precision="64-true", max_epochs=1, num_sanity_val_steps=0, seed=3, **QUIET)
    trainer.fit(Measured(), loader(), ckpt_path=path)
    assert trainer.global_step == 7
    return {name: float(torch.as_tensor(value)) for name, value in trainer.callback_metrics.items()}
