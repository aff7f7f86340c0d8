"""What hooks of the start of training draw, perhaps for the weights (RecTools), which every rank must draw alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))

        def on_fit_start(self) -> None:
            nn.init.normal_(self.net[0].weight)

        def on_train_start(self) -> None:
            drawn = self.all_gather(torch.rand(3))
            self.alike = bool((drawn == drawn.reshape(-1, 3)[0]).all())

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def script(lab: Any) -> None:
        L.seed_everything(3)
        data = TensorDataset(torch.randn(48, 3), torch.randn(48, 1))
        trainer = lab.trainer(max_epochs=2, log_every_n_steps=1)
        module = Net()
        trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8))
        lab.note("drawn alike", module.alike)

    return script
