"""Loaders that are read at once: each has another order in each epoch, and the same on all ranks."""

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
            self.read: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.read.append({name: part.flatten().tolist() for name, part in batch.items()})
            return (self.net(batch["a"]).mean() - self.net(batch["b"]).mean()).pow(2)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.001)

    def rows(n: int) -> Any:
        return DataLoader(torch.arange(float(n)).reshape(-1, 1), batch_size=2, shuffle=True)

    def script(laboratory: Any) -> None:
        L.seed_everything(7)
        module = Net()
        laboratory.trainer(max_epochs=3, enable_checkpointing=False).fit(module, {"a": rows(16), "b": rows(8)})
        laboratory.note("read", module.read)

    return script
