"""Wishes to stop before a batch is read, time that is used up at once, and named schedules beside unnamed ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            schedule = torch.optim.lr_scheduler
            first = torch.optim.SGD(self.parameters(), lr=0.1)
            return [first], [
                {"scheduler": schedule.StepLR(first, 1, 0.9), "name": "before"},
                {"scheduler": schedule.StepLR(first, 1, 0.9), "interval": "step"},
                {"scheduler": schedule.StepLR(first, 1, 0.9)},
                {"scheduler": schedule.StepLR(first, 1, 0.9), "name": "after"},
            ]

    class Stop(L.Callback):
        def __init__(self, hook: str, epoch: int) -> None:
            self.epoch = epoch
            setattr(self, hook, self._stop)

        def _stop(self, trainer: Any, *args: Any) -> None:
            if trainer.current_epoch == self.epoch:
                trainer.should_stop = True

    def script(lab: Any) -> None:
        x = torch.randn(24, 4)
        loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=4, shuffle=True)

        def fit(*callbacks: Any, **options: Any) -> None:
            options = {"max_epochs": 3, "log_every_n_steps": 2, **options}
            trainer = lab.trainer(callbacks=[*callbacks, L.callbacks.LearningRateMonitor()], **options)
            trainer.fit(Net(), loader, loader)

        fit(Stop("on_train_epoch_start", 1))
        fit(Stop("on_train_epoch_start", 0), min_steps=4)
        fit(Stop("on_fit_start", 0))
        fit(max_time={"seconds": 0})

    return script
