"""Accumulated gradients: whole windows as in Lightning; a short last window of an epoch weighs what it holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_SHORT = "Lightning divides the short last window by the full count, here it is the mean of what it holds"
DIFFERENCES = {
    **{f"1.0.fit.{what}": _SHORT for what in ("weights.*", "losses", "callback_metrics.*", "logged_metrics.loss*")},
    "checkpoint.short/*.state_dict": _SHORT,
    "checkpoint.short/*.optimizer_states": _SHORT,
    "table.short/*": _SHORT,
}


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, self.trainer.estimated_stepping_batches)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def script(lab: Any) -> None:
        x = torch.randn(60, 4)
        data = TensorDataset(x, (x[:, 0] > 0).long())
        for name, size in (("whole", 10), ("short", 12)):  # six batches, five batches
            logger = L.loggers.CSVLogger(str(lab.folder), name=name)
            trainer = lab.trainer(max_epochs=2, accumulate_grad_batches=3, logger=logger, log_every_n_steps=1)
            trainer.fit(Net(), DataLoader(data, batch_size=size))

    return script
