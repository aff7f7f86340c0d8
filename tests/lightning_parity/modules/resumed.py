"""Training interrupted within an epoch by max_steps and gone on with from its checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_REST = "Lightning goes on within an epoch by its number of batches, but from the first batch of the loader"
DIFFERENCES = {
    **{f"{run}.fit.{what}": _REST for run in ("1.0", "2.0") for what in ("*metrics.*", "losses", "weights.*")},
    **{f"checkpoint.lightning_logs/version_{run}/*s*_*": _REST for run in (1, 2)},
    **{f"table.lightning_logs/version_{run}/*": _REST for run in (1, 2)},
    "?.0.fit.counted.on_fit_start": "the counters of a resumed run are there when its first hook is called",
    "1.0.fit.hooks": "what a project prepares as an epoch starts is prepared where it goes on, too",
    "1.0.fit.counted.on_train_epoch_start": "the same",
}


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self, dropout: float = 0.0) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(
                nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2)
            )
            self.batches: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            self.batches.append((self.current_epoch, batch_idx, self.global_step))
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val", nn.functional.cross_entropy(self.net(x), y))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
                    "interval": "step",
                },
            }

    def script(lab: Any) -> None:
        x = torch.randn(40, 4)
        data = TensorDataset(x, (x[:, 0] > 0).long())
        train, val = DataLoader(data, batch_size=8), DataLoader(data, batch_size=20)
        checkpoint = L.callbacks.ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)
        first = lab.trainer(max_steps=10, callbacks=[checkpoint], log_every_n_steps=2)
        first.fit(Net(), train, val)
        model = Net()
        second = lab.trainer(max_epochs=3, log_every_n_steps=2)
        second.fit(
            model, train, val, ckpt_path=str(lab.folder / "lightning_logs/version_0/checkpoints/epoch=1-step=8.ckpt")
        )
        lab.note("batches", model.batches)
        by_epoch = lab.trainer(max_epochs=4, log_every_n_steps=2)
        by_epoch.fit(model, train, val, ckpt_path=second.checkpoint_callback.best_model_path)

    return script
