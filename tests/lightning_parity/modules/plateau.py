"""A regressor on a plateau schedule that stops early, keeps its two best checkpoints and tests the best."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    from math import sqrt

    class HousePrices(L.LightningDataModule):
        def __init__(self, batch_size: int = 16) -> None:
            super().__init__()
            self.save_hyperparameters()

        def setup(self, stage: str) -> None:
            g = torch.Generator().manual_seed(4)
            x = torch.randn(90, 5, generator=g)
            y = x @ torch.arange(5.0) / sqrt(5) + 0.1 * torch.randn(90, generator=g)
            self.train, self.val, self.test = (TensorDataset(x[a:b], y[a:b]) for a, b in ((0, 60), (60, 75), (75, 90)))

        def train_dataloader(self) -> Any:
            return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(self.val, batch_size=self.hparams.batch_size)

        def test_dataloader(self) -> Any:
            return DataLoader(self.test, batch_size=4)

    class Regressor(L.LightningModule):
        def __init__(self, width: int = 8, lr: float = 0.1, patience: int = 0) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 1))
            self.criterion = nn.MSELoss()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).squeeze(-1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = self.criterion(self(x), y)
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = self.criterion(self(x), y)
            self.log("val_loss", loss, prog_bar=True)
            return loss

        def test_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("test_loss", self.criterion(self(x), y))
            self.log("test_mae", (self(x) - y).abs().mean(), on_step=True, on_epoch=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(
                        optimizer, factor=0.3, patience=self.hparams.patience, min_lr=1e-4
                    ),
                    "monitor": "val_loss",
                    "name": "plateau_lr",
                },
            }

    def script(lab: Any) -> None:
        L.seed_everything(6)
        dm, model = HousePrices(), Regressor()
        early = L.callbacks.EarlyStopping("val_loss", patience=3, min_delta=0.02, mode="min")
        best = L.callbacks.ModelCheckpoint(
            dirpath=str(lab.folder / "models"),
            filename="{epoch}-{val_loss:.2f}",
            monitor="val_loss",
            save_top_k=2,
            save_last="link",
        )
        trainer = lab.trainer(
            max_epochs=12, callbacks=[early, best, L.callbacks.LearningRateMonitor("epoch")], log_every_n_steps=2
        )
        trainer.fit(model, datamodule=dm)
        trainer.test(ckpt_path="best", datamodule=dm, verbose=False)
        lab.note("stopped", early.stopped_epoch)
        lab.note("waited", early.wait_count)
        lab.note("best score", float(best.best_model_score))
        lab.note("kept", {k.rpartition("/")[2]: float(v) for k, v in best.best_k_models.items()})
        lab.note("last", best.last_model_path.rpartition("/")[2])

    return script
