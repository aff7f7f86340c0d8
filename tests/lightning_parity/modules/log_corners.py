"""Values logged from every hook, under one name in training and validation, of every type, with every flag."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, SumMetric


def project(L: Any) -> Any:
    class Logging(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            pl_module.log("callback/step", float(batch_idx))
            pl_module.log("callback/both", 2.0 * batch_idx, on_step=True, on_epoch=True)

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("callback/val", 1.5)

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log_dict({"callback/start": 1, "callback/bool": True})

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)
            self.mean, self.total = MeanMetric(), SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss, prog_bar=True)
            self.log("int", batch_idx, on_epoch=True)
            self.log("hidden", loss, logger=False, prog_bar=True, on_epoch=True)
            self.log("epoch_only", loss, on_step=False, on_epoch=True)
            self.log("smallest", loss, on_step=False, on_epoch=True, reduce_fx=torch.min)
            self.log("largest", loss, on_step=True, on_epoch=True, reduce_fx="max")
            self.log("added", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum")
            self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=batch_idx + 1)
            self.mean.update(loss.detach())
            self.log("metric", self.mean, on_step=True, on_epoch=True)
            self.log("counted", self.total(1.0))
            if batch_idx == 1:
                self.log("once", 3.0, on_step=True, on_epoch=True)
            return loss

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.log("zero", 0.0)

        def on_before_backward(self, loss: torch.Tensor) -> None:
            self.log("before_backward", loss)

        def on_after_backward(self) -> None:
            self.log("gradient", self.net.weight.grad.norm(), on_step=True, on_epoch=True)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log("rate", optimizer.param_groups[0]["lr"])

        def on_train_start(self) -> None:
            self.log("at_start", 7.0)

        def on_train_epoch_end(self) -> None:
            self.log("end", self.trainer.callback_metrics["epoch_only"] * 2, prog_bar=True)
            self.log("end_total", self.total.compute(), logger=True)
            self.total.reset()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss, on_step=False, on_epoch=True)
            self.log("val/both", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("val/worst", loss, reduce_fx=max)
            self.log("val/step", loss, on_step=True, on_epoch=False)

        def on_validation_start(self) -> None:
            self.log("val/at_start", 1.0)

        def on_validation_epoch_end(self) -> None:
            self.log_dict({"val/end": 2.0, "val/epoch": float(self.current_epoch)}, prog_bar=True, logger=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def script(lab: Any) -> None:
        x = torch.randn(22, 4)
        data = TensorDataset(x, (x[:, 0] > 0).long())
        for every in (1, 3):
            trainer = lab.trainer(
                max_epochs=2, callbacks=[Logging()], log_every_n_steps=every, enable_checkpointing=False
            )
            trainer.fit(Net(), DataLoader(data, batch_size=5), DataLoader(data, batch_size=8))

    return script
