"""Steps of evaluations over several loaders, combined over ranks: each row beside its own loader's batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch).pow(2).mean()

        def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int) -> None:
            self.log("val", batch.sum() + self.current_epoch, on_step=True, sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.001)

    def rows(n: int) -> Any:
        return DataLoader(torch.arange(float(n)).reshape(-1, 1), batch_size=2)

    def script(laboratory: Any) -> None:
        L.seed_everything(7)
        laboratory.trainer(max_epochs=2, enable_checkpointing=False).fit(Net(), rows(8), [rows(12), rows(4)])

    return script
