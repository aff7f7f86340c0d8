"""A learning rate found before training, by the Tuner and by the callback; a batch size found for a data module."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_TRACE = "trials leave no trace: nothing is saved and loaded around them, and nothing is logged"
DIFFERENCES = {
    f"*.fit.{what}": _TRACE
    for what in ("counted.on_load_checkpoint", "counted.on_save_checkpoint", "hooks", "*_metrics.loss")
}


def project(L: Any) -> Any:
    Tuner = import_module(f"{L.__name__}.tuner").Tuner

    class Data(L.LightningDataModule):
        def __init__(self, batch_size: int = 2) -> None:
            super().__init__()
            self.batch_size = batch_size
            x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
            self.data = TensorDataset(x, (x[:, 0] > 0).long())

        def train_dataloader(self) -> Any:
            return DataLoader(self.data, batch_size=self.batch_size)

    class Net(L.LightningModule):
        def __init__(self, learning_rate: float = 1e-3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)

    def script(lab: Any) -> None:
        model, data = Net(), Data(8)
        trainer = lab.trainer(max_epochs=4, log_every_n_steps=2)
        finder = Tuner(trainer).lr_find(model, datamodule=data, min_lr=1e-4, max_lr=1.0, num_training=20)
        lab.note("results", finder.results)
        lab.note("suggestion", finder.suggestion())
        lab.note("set", model.hparams.learning_rate)
        trainer.fit(model, data)
        sized = Data(2)
        other = lab.trainer(max_epochs=1, logger=False, enable_checkpointing=False)
        size = Tuner(other).scale_batch_size(Net(), datamodule=sized, mode="power", steps_per_trial=1, max_trials=3)
        lab.note("size", [size, sized.batch_size])
        callback = L.callbacks.LearningRateFinder(min_lr=1e-4, max_lr=1.0, num_training_steps=15)
        third = lab.trainer(max_epochs=4, callbacks=[callback], logger=False, enable_checkpointing=False)
        L.seed_everything(1)  # the trials before have drawn random numbers under Lightning
        found = Net()
        third.fit(found, Data(8))
        lab.note("callback", [callback.optimal_lr.suggestion(), found.hparams.learning_rate])

    return script
