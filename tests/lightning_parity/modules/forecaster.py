"""A forecaster in the manner of forecasting libraries: its own log helper, stages by name, several predictions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset[Any]):
    def __init__(self, start: int, end: int, past: int = 8, future: int = 3) -> None:
        t = torch.arange(0, 90, dtype=torch.float32)
        self.series = torch.sin(t / 5) + 0.1 * torch.randn(90, generator=torch.Generator().manual_seed(2))
        self.at, self.past, self.future = range(start, end - past - future), past, future

    def __len__(self) -> int:
        return len(self.at)

    def __getitem__(self, i: int) -> Any:
        s = self.at[i]
        x = {"encoder": self.series[s : s + self.past, None], "index": torch.tensor(s)}
        return x, (self.series[s + self.past : s + self.past + self.future], None if False else torch.ones(()))


class QuantileLoss(nn.Module):
    def __init__(self, quantiles: tuple[float, ...] = (0.1, 0.5, 0.9)) -> None:
        super().__init__()
        self.quantiles = quantiles

    def forward(self, pred: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        errors = [target - pred[..., i] for i in range(len(self.quantiles))]
        return (
            torch.stack([torch.max((q - 1) * e, q * e) for q, e in zip(self.quantiles, errors, strict=True)])
            .sum(0)
            .mean()
        )


def project(L: Any) -> Any:
    class BaseModel(L.LightningModule):
        def __init__(
            self, loss: nn.Module, learning_rate: float = 1e-2, reduce_on_plateau_patience: int = 0, **kwargs: Any
        ) -> None:
            super().__init__()
            frame_kwargs = {
                "learning_rate": learning_rate,
                "reduce_on_plateau_patience": reduce_on_plateau_patience,
                **kwargs,
            }
            self.save_hyperparameters(frame_kwargs)
            self.loss = loss

        @property
        def current_stage(self) -> str:
            stages = {
                "training": "train",
                "validating": "val",
                "testing": "test",
                "predicting": "predict",
                "sanity_checking": "val",
            }
            return next((name for flag, name in stages.items() if getattr(self.trainer, flag)), "train")

        def log_metrics(self, x: Any, y: Any, out: torch.Tensor) -> None:
            median = out[..., 1]
            for name, value in {
                "MAE": (median - y[0]).abs().mean(),
                "RMSE": (median - y[0]).pow(2).mean().sqrt(),
            }.items():
                self.log(
                    f"{self.current_stage}_{name}",
                    value,
                    on_step=self.training,
                    on_epoch=True,
                    prog_bar=False,
                    batch_size=len(y[0]),
                )

        def step(self, x: Any, y: Any, batch_idx: int) -> Any:
            out = self(x)
            loss = self.loss(out, y[0])
            self.log(
                f"{self.current_stage}_loss",
                loss,
                on_step=self.training,
                on_epoch=True,
                prog_bar=True,
                batch_size=len(y[0]),
            )
            self.log_metrics(x, y, out)
            return {"loss": loss, "n": len(y[0])}, out

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.step(*batch, batch_idx)[0]

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.step(*batch, batch_idx)[0]

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            return self.step(*batch, batch_idx)[0]

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            x, _ = batch
            return self(x), x["index"]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)
            patience = self.hparams.reduce_on_plateau_patience
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=patience, cooldown=1)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": scheduler,
                    "monitor": "val_loss",
                    "interval": "epoch",
                    "frequency": 1,
                    "strict": False,
                },
            }

    class RNNForecaster(BaseModel):
        def __init__(self, hidden: int = 6, **kwargs: Any) -> None:
            super().__init__(loss=QuantileLoss(), hidden=hidden, **kwargs)
            self.rnn, self.out = nn.GRU(1, hidden, batch_first=True), nn.Linear(hidden, 9)

        def forward(self, x: Any) -> torch.Tensor:
            _, h = self.rnn(x["encoder"])
            return self.out(h[-1]).view(-1, 3, 3)

    def script(lab: Any) -> None:
        L.seed_everything(8)
        train, val, test = (
            DataLoader(Windows(a, b), batch_size=8, shuffle=a == 0) for a, b in ((0, 50), (45, 70), (65, 90))
        )
        early = L.callbacks.EarlyStopping(monitor="val_loss", min_delta=1e-4, patience=10, verbose=False, mode="min")
        trainer = lab.trainer(
            max_epochs=4, gradient_clip_val=0.1, limit_train_batches=3, callbacks=[early], log_every_n_steps=2
        )
        model = RNNForecaster()
        trainer.fit(model, train_dataloaders=train, val_dataloaders=val)
        trainer.test(model, test, verbose=False)
        trainer.predict(model, [val, test])

    return script
