"""Discriminative learning rates in several groups, layers unfrozen as training goes, two schedulers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class Gradual(L.LightningModule):
        def __init__(self, lr: float = 0.1, decay: float = 0.5) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layers = nn.ModuleList([nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)])
            self.freeze_to(2)

        @property
        def trainable(self) -> int:
            return sum(p.numel() for p in self.parameters() if p.requires_grad)

        def freeze_to(self, n: int) -> None:
            for i, layer in enumerate(self.layers):
                layer.requires_grad_(i >= n)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[:-1]:
                x = torch.tanh(layer(x))
            return self.layers[-1](x)

        def on_train_epoch_start(self) -> None:
            self.freeze_to(max(0, 2 - self.current_epoch))
            self.log("trainable", float(self.trainable))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self(x), y)
            self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            n = len(self.layers)
            groups = [
                {
                    "params": layer.parameters(),
                    "lr": self.hparams.lr * self.hparams.decay ** (n - 1 - i),
                    "name": f"layer{i}",
                }
                for i, layer in enumerate(self.layers)
            ]
            optimizer = torch.optim.SGD(groups, lr=self.hparams.lr, momentum=0.9)
            warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
            main = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.8)
            schedulers = [
                {"scheduler": warm, "interval": "step", "name": "warm"},
                {"scheduler": main, "interval": "epoch"},
            ]
            return [optimizer], schedulers

    def script(lab: Any) -> None:
        x = torch.randn(48, 5)
        y = (x[:, 0] > 0).long()
        monitor = L.callbacks.LearningRateMonitor(logging_interval="step", log_momentum=True)
        trainer = lab.trainer(max_epochs=4, callbacks=monitor, log_every_n_steps=1)
        trainer.fit(Gradual(), DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True))
        lab.note("rates", dict(monitor.lrs.items()))

    return script
