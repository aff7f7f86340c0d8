"""Accumulation that changes with the epochs, stochastic depth by a LambdaCallback, a limit of time that is not met."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 2))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss, on_epoch=True)
            self.log("window", float(self.trainer.accumulate_grad_batches))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9), "interval": "step"}]

    def script(lab: Any) -> None:
        x = torch.randn(96, 4)
        loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8, shuffle=True)
        seen: list[Any] = []
        model = Net()

        def deeper(trainer: Any, pl_module: Any) -> None:
            pl_module.net[2].p = 0.2 * (trainer.current_epoch + 1)
            seen.append((trainer.current_epoch, trainer.accumulate_grad_batches))

        timer = L.callbacks.Timer(duration="00:01:00:00", interval="epoch")
        callbacks = [
            L.callbacks.GradientAccumulationScheduler(scheduling={0: 4, 1: 2, 3: 1}),
            L.callbacks.LambdaCallback(on_train_epoch_start=deeper, setup=lambda *args, **kwargs: seen.append("setup")),
            timer,
        ]
        trainer = lab.trainer(max_epochs=4, callbacks=callbacks, log_every_n_steps=2)
        trainer.fit(model, loader)
        lab.note("seen", seen)
        lab.note(
            "timed",
            [timer.time_elapsed("train") > 0, timer.time_elapsed("validate") == 0, timer.time_remaining() > 3500],
        )

    return script
