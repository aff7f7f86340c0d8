"""Evaluation in every order: before training, with a model and without, of the best, the last, a named checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))
            self.modes: list[bool] = []

        def step(self, batch: Any, stage: str) -> torch.Tensor:
            x, y = batch
            self.modes.append(self.training)
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log(f"{stage}/loss", loss)
            return loss

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.step(batch, "train")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.step(batch, "val")

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.step(batch, "test")

        def train_dataloader(self) -> Any:
            return DataLoader(self.data(0), batch_size=8, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(self.data(1), batch_size=8)

        test_dataloader = val_dataloader

        def predict_dataloader(self) -> Any:
            return DataLoader(self.data(2), batch_size=7)

        def data(self, seed: int) -> Any:
            x = torch.randn(24, 4, generator=torch.Generator().manual_seed(seed))
            return TensorDataset(x, (x[:, 0] > 0).long())

        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            self.trainer.fit_loop.setup_data()
            self.per_epoch = len(self.trainer.train_dataloader)
            return torch.optim.SGD(self.parameters(), lr=0.5)

    def script(lab: Any) -> None:
        model = Net()
        checkpoint = L.callbacks.ModelCheckpoint(monitor="val/loss", save_last=True, save_top_k=2, filename="{epoch}")
        trainer = lab.trainer(max_epochs=3, callbacks=[checkpoint], log_every_n_steps=1)
        trainer.validate(model, verbose=False)
        trainer.fit(model)
        lab.note("per epoch", model.per_epoch)
        trainer.test(model, verbose=False)
        trainer.test(verbose=False)
        trainer.test(ckpt_path="last", verbose=False)
        trainer.validate(ckpt_path="best", verbose=False)
        trainer.predict(ckpt_path=checkpoint.last_model_path)
        trainer.predict(model)
        trainer.fit_loop.max_epochs = 4
        trainer.fit(model)
        lab.note("modes", model.modes)
        lab.note("ends training", model.training)
        fresh = lab.trainer(logger=False)
        fresh.test(Net(), ckpt_path=checkpoint.best_model_path, verbose=False)

    return script
