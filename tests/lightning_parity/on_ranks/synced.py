"""Values logged with and without ``sync_dist``, a checkpoint by a synced metric, torchmetrics, gathered tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy

DIFFERENCES = {"0.0.fit.*_metrics.val/first": "what the first rank logs for itself is known to all when ranks have met"}


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 1))
            self.accuracy = BinaryAccuracy()
            self.batches: list[float] = []
            self.gathered: list[Any] = []

        def step(self, batch: Any) -> Any:
            x, y = batch
            logits = self.net(x).squeeze(-1)
            return nn.functional.binary_cross_entropy_with_logits(logits, y.float()), logits

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss, _ = self.step(batch)
            self.batches.append(float(batch[0].sum()))
            self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            self.log("train/mine", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss, logits = self.step(batch)
            self.accuracy(logits, batch[1])
            self.log("val/accuracy", self.accuracy, on_epoch=True)
            self.log("val/loss", loss, sync_dist=True)
            self.log("val/mine", loss)
            self.log("val/worst", loss, sync_dist=True, reduce_fx="max")
            self.log("val/samples", float(len(batch[0])), sync_dist=True, reduce_fx="sum")
            if self.trainer.is_global_zero:
                counted = (batch[1] >= 0).sum()  # a tensor, as uni2ts has it
                self.log("val/first", float(self.global_rank), rank_zero_only=True, batch_size=counted)

        def on_validation_epoch_end(self) -> None:
            self.gathered.append(self.all_gather(torch.tensor([float(self.global_rank)])).flatten().tolist())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.2)

    class Reading(L.Callback):
        """Reads metrics where ranks have to have met for them, also in the sanity check."""

        def __init__(self) -> None:
            self.seen: list[Any] = []

        def read(self, trainer: Any) -> None:
            for metrics in (trainer.callback_metrics, trainer.logged_metrics):
                known = {name: float(value) for name, value in metrics.items() if name != "val/first"}
                self.seen.append((trainer.sanity_checking, trainer.global_step, sorted(known.items())))

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.read(trainer)

        def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
            self.read(trainer)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.read(trainer)

    def script(lab: Any) -> None:
        L.seed_everything(17)
        x = torch.randn(48, 4)
        data = TensorDataset(x, (x[:, 0] > 0).long())
        model = Net()
        checkpoint = L.callbacks.ModelCheckpoint(
            monitor="val/loss", filename="{epoch}-{val/loss:.4f}", auto_insert_metric_name=False
        )
        reading = Reading()
        trainer = lab.trainer(max_epochs=2, callbacks=[checkpoint, reading], log_every_n_steps=2)
        trainer.fit(model, DataLoader(data, batch_size=6, shuffle=True), DataLoader(data, batch_size=8))
        lab.note("batches", model.batches)
        lab.note("read", reading.seen)
        lab.note("gathered", model.gathered)
        lab.note("best", checkpoint.best_model_path.rpartition("/")[2])

    return script
