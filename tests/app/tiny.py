"""A recipe of a user: a module and data that take no time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.data import DataModule
from drivetrain.module import TrainModule


class Tiny(TrainModule):
    """A line through random points."""

    def __init__(self, optimizer: Callable[[Iterable[nn.Parameter]], Optimizer], width: int = 3) -> None:
        super().__init__()
        self.net = nn.Linear(width, 1)
        self.make_optimizer = optimizer

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test/loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class Points(DataModule):
    """Eleven points, of which two workers get five and six."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(11, 3, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader
