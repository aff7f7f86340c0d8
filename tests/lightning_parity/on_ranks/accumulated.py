"""Windows of two batches over two ranks, validated and saved within them, and training stopped within one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]

    class Stopping(L.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1 and trainer.global_step == 4:
                trainer.should_stop = True

    def script(lab: Any) -> None:
        L.seed_everything(3)
        data = TensorDataset(torch.randn(48, 3), torch.randn(48, 1))
        saver = L.callbacks.ModelCheckpoint(monitor="val", save_top_k=-1, filename="{epoch}-{step}")
        trainer = lab.trainer(
            max_epochs=3,
            accumulate_grad_batches=2,
            val_check_interval=3,
            callbacks=[saver, Stopping()],
            log_every_n_steps=1,
        )
        trainer.fit(Net(), DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8))

    return script
