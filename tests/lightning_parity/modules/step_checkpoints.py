"""Training counted in steps: validation every few batches over epochs, checkpoints by step and by metric."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 1)

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y)
            self.log("train/loss", loss)
            return {"loss": loss}

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val/loss", nn.functional.mse_loss(self.net(x), y))
            self.log("val_mae", (self.net(x) - y).abs().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    def script(lab: Any) -> None:
        x = torch.randn(40, 3)
        train = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
        val = DataLoader(TensorDataset(x[:10], x[:10].sum(1, keepdim=True)), batch_size=5)
        Checkpoint = L.callbacks.ModelCheckpoint
        callbacks = [
            Checkpoint(monitor="val_mae", save_top_k=2, dirpath=lab.folder / "best", filename="{step}-{val_mae:.3f}"),
            Checkpoint(
                every_n_train_steps=5,
                save_top_k=-1,
                dirpath=lab.folder / "all",
                filename="s{step:04d}",
                auto_insert_metric_name=False,
            ),
            Checkpoint(
                monitor="step",
                mode="max",
                save_top_k=1,
                every_n_train_steps=2,
                save_last=True,
                dirpath=lab.folder / "newest",
                filename="n",
            ),
            Checkpoint(
                monitor="train/loss",
                every_n_train_steps=3,
                dirpath=lab.folder / "train",
                filename="{epoch}-{train/loss:.2f}",
                auto_insert_metric_name=True,
            ),
            Checkpoint(
                save_on_train_epoch_end=True,
                dirpath=lab.folder / "ends",
                save_weights_only=True,
                enable_version_counter=False,
            ),
        ]
        trainer = lab.trainer(
            max_steps=17,
            val_check_interval=4,
            check_val_every_n_epoch=None,
            callbacks=callbacks,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
        )
        trainer.fit(Net(), train, val)
        for i, callback in enumerate(callbacks):
            name = callback.best_model_path.rpartition("/")[2]
            lab.note(
                f"best {i}", [name, None if callback.best_model_score is None else float(callback.best_model_score)]
            )
            lab.note(f"kept {i}", sorted(k.rpartition("/")[2] for k in callback.best_k_models))
            lab.note(f"state {i}", callback.state_key.replace(str(lab.folder), ""))

    return script
