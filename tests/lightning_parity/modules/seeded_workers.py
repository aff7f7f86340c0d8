"""Augmentation at random in a loader's workers, seeded for every library that draws numbers there."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([random.random(), np.random.rand(), float(torch.rand(())), float(i)], dtype=torch.float32)


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen.append(batch.tolist())
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def script(lab: Any) -> None:
        lab.note("seed", L.seed_everything(99, workers=True))
        model = Net()
        loader = DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=2)
        trainer = lab.trainer(max_epochs=2, log_every_n_steps=1, enable_checkpointing=False)
        trainer.fit(model, loader)
        lab.note("seen", model.seen)

    return script
