"""Small modules that documentation and tests are written with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain.data import DataModule
from drivetrain.lightning import deep_names
from drivetrain.module import TrainModule

__path__: list[str] = []


class RandomDataset(Dataset[Tensor]):
    """``length`` rows of ``size`` normal numbers."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class BoringModel(TrainModule):
    """One linear layer from 32 numbers to 2, drawn towards ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        return nn.functional.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Tensor) -> Tensor:
        return self.loss(self(batch))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"x": self.step(batch)}

    def test_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64))

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class BoringDataModule(DataModule):
    """Random rows for every stage."""

    def setup(self, stage: str) -> None:
        self.random_full = RandomDataset(32, 64)

    def train_dataloader(self) -> Any:
        return DataLoader(self.random_full)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class DemoModel(BoringModel):
    """A :class:`BoringModel` with hyper-parameters."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(32, out_dim)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=self.hparams.learning_rate)


deep_names.name_below(__name__)
