"""Averages of weights: SWA with its rate, and an exponential moving average that validates and is saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_PASS = "the last pass, which renews the statistics of BatchNorm, steps no optimizer and logs its losses undivided"
DIFFERENCES = {f"[01].0.fit.{what}": _PASS for what in ("hooks", "losses", "counted.on_before_optimizer_step")}


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]

    def script(lab: Any) -> None:
        x = torch.randn(40, 5)
        data = TensorDataset(x, (x[:, 0] > 0).long())
        train, val = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=20)
        callbacks = {
            "swa": L.callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=2),
            "share": L.callbacks.StochasticWeightAveraging(
                swa_lrs=[0.01], swa_epoch_start=0.5, annealing_strategy="linear"
            ),
            "ema": L.callbacks.EMAWeightAveraging(decay=0.8),
        }
        for name, callback in callbacks.items():
            logger = L.loggers.CSVLogger(str(lab.folder), name=name)
            trainer = lab.trainer(max_epochs=5, callbacks=[callback], logger=logger, log_every_n_steps=2)
            trainer.fit(Net(), train, val)

    return script
