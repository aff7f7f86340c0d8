"""Predictions written by batch and by epoch, returned for one loader and for several, after a checkpoint is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class CustomWriter(L.callbacks.BasePredictionWriter):
        def __init__(self, output_dir: Path, write_interval: str) -> None:
            super().__init__(write_interval)
            self.output_dir, self.seen = output_dir, []
            os.makedirs(output_dir, exist_ok=True)

        def write_on_batch_end(
            self,
            trainer: Any,
            pl_module: Any,
            prediction: Any,
            batch_indices: Any,
            batch: Any,
            batch_idx: int,
            dataloader_idx: int,
        ) -> None:
            torch.save(prediction, self.output_dir / f"{dataloader_idx}_{batch_idx}.pt")
            self.seen.append((dataloader_idx, batch_idx, batch_indices, float(prediction["probs"].sum())))

        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
            torch.save(predictions, self.output_dir / f"predictions_{trainer.global_rank}.pt")
            self.seen.append((len(predictions), batch_indices))

    class Net(L.LightningModule):
        def __init__(self, classes: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, classes))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self(x), y)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, torch.Tensor]:
            probs = self(batch[0]).softmax(-1)
            return {"probs": probs, "label": probs.argmax(-1)}

        def on_predict_epoch_end(self) -> None:
            self.predicted = True

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.05)

    def script(lab: Any) -> None:
        x = torch.randn(30, 4)
        train = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=10)
        one, two = DataLoader(TensorDataset(x[:11]), batch_size=4), DataLoader(TensorDataset(x[11:20]), batch_size=5)
        intervals = ("batch", "epoch", "batch_and_epoch")
        writers = [CustomWriter(lab.folder / interval, interval) for interval in intervals]
        model = Net()
        trainer = lab.trainer(max_epochs=2, callbacks=writers[:1], log_every_n_steps=1)
        trainer.fit(model, train)
        trainer.predict(model, one)
        trainer.predict(dataloaders=[one, two], ckpt_path="best")
        for writer in writers[1:]:
            alone = lab.trainer(callbacks=[writer], logger=False)
            alone.predict(model, [one, two], return_predictions=False)
        for interval, writer in zip(intervals, writers, strict=True):
            lab.note(f"seen {interval}", writer.seen)

    return script
