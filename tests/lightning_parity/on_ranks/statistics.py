"""BatchNorm over two ranks: the same training, other running statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_MEAN = "the ranks' running statistics are averaged where they are saved or evaluated, Lightning keeps each rank's own"
DIFFERENCES = {"0.0.fit.weights.net.1.running_*": _MEAN, "checkpoint.*.state_dict": _MEAN}


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y)
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def script(lab: Any) -> None:
        L.seed_everything(2)
        x = torch.randn(32, 4)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
        trainer = lab.trainer(max_epochs=2, log_every_n_steps=2)
        trainer.fit(Net(), loader)

    return script
