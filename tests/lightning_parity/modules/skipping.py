"""Batches that give no loss, epochs cut short, training stopped by the module, loaders made anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class Picky(L.LightningModule):
        def __init__(self, curriculum: int = 2) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)
            self.x = torch.randn(48, 4)
            self.curriculum = curriculum
            self.seen: list[Any] = []

        def train_dataloader(self) -> Any:
            n = 16 * min(3, 1 + self.current_epoch // 2)
            return DataLoader(TensorDataset(self.x[:n], (self.x[:n, 0] > 0).long()), batch_size=4, shuffle=True)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 2 and batch_idx == 5 else None

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
            x, y = batch
            self.seen.append((self.current_epoch, batch_idx))
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            if batch_idx % 3 == 2:
                return None
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("seen", float(len(self.seen)))
            if self.current_epoch == 4:
                self.trainer.should_stop = True

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def script(lab: Any) -> None:
        model = Picky()
        trainer = lab.trainer(max_epochs=8, reload_dataloaders_every_n_epochs=1, log_every_n_steps=2)
        trainer.fit(model)
        lab.note("seen", model.seen)

    return script
