"""torchmetrics in every way that they are logged: collections, objects, computed values, a best value kept."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score


def project(L: Any) -> Any:
    class MNISTLitModule(L.LightningModule):
        def __init__(self, net: nn.Module, lr: float = 0.05) -> None:
            super().__init__()
            self.save_hyperparameters(logger=False, ignore=["net"])
            self.net = net
            self.criterion = nn.CrossEntropyLoss()
            metrics = MetricCollection(
                {
                    "acc": MulticlassAccuracy(3, average="micro"),
                    "f1": MulticlassF1Score(3),
                    "acc_macro": MulticlassAccuracy(3),
                }
            )
            self.train_metrics = metrics.clone(prefix="train/")
            self.val_metrics = metrics.clone(prefix="val/")
            self.test_acc = nn.ModuleList([MulticlassAccuracy(3), MulticlassAccuracy(3, top_k=2)])
            self.train_loss, self.val_loss, self.test_loss = MeanMetric(), MeanMetric(), MeanMetric()
            self.val_acc_best = MaxMetric()
            self.confusion = MulticlassConfusionMatrix(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def on_train_start(self) -> None:
            self.val_loss.reset()
            self.val_metrics.reset()
            self.val_acc_best.reset()

        def model_step(self, batch: Any) -> Any:
            x, y = batch
            logits = self.forward(x)
            return self.criterion(logits, y), logits, y

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss, logits, targets = self.model_step(batch)
            self.train_loss(loss)
            output = self.train_metrics(logits, targets)
            self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
            self.log_dict({f"{name}_batch": value for name, value in output.items()}, on_step=True, on_epoch=False)
            self.log_dict(self.train_metrics, on_step=False, on_epoch=True, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss, logits, targets = self.model_step(batch)
            self.val_loss(loss)
            self.val_metrics.update(logits, targets)
            self.confusion.update(logits, targets)
            self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)

        def on_validation_epoch_end(self) -> None:
            computed = self.val_metrics.compute()
            self.log_dict(computed)
            self.val_acc_best(computed["val/acc"])
            self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)
            self.last_confusion = self.confusion.compute().tolist()
            self.val_metrics.reset()
            self.confusion.reset()

        def test_step(self, batch: Any, batch_idx: int) -> None:
            loss, logits, targets = self.model_step(batch)
            self.test_loss(loss)
            for k, metric in enumerate(self.test_acc, 1):
                metric(logits, targets)
                self.log(f"test/top{k}", metric, on_step=True, on_epoch=True, metric_attribute=f"test_acc.{k - 1}")
            self.log("test/loss", self.test_loss, on_step=False, on_epoch=True, prog_bar=True)

        def configure_optimizers(self) -> dict[str, Any]:
            return {"optimizer": torch.optim.Adam(params=self.trainer.model.parameters(), lr=self.hparams.lr)}

    def script(lab: Any) -> None:
        assert torchmetrics
        L.seed_everything(12)
        x = torch.randn(50, 6)
        y = x[:, :3].argmax(1)
        train, val = TensorDataset(x[:35], y[:35]), TensorDataset(x[35:], y[35:])
        model = MNISTLitModule(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
        checkpoint = L.callbacks.ModelCheckpoint(
            monitor="val/acc", mode="max", filename="epoch_{epoch:03d}", auto_insert_metric_name=False, save_last=True
        )
        trainer = lab.trainer(max_epochs=3, callbacks=[checkpoint], log_every_n_steps=2)
        trainer.fit(model, DataLoader(train, batch_size=8, shuffle=True), DataLoader(val, batch_size=4))
        trainer.test(model, DataLoader(val, batch_size=4), ckpt_path=checkpoint.best_model_path, verbose=False)
        lab.note("confusion", model.last_confusion)

    return script
