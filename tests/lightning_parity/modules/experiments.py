"""TensorBoard used through its experiment, two loggers at once, figures read back from the event files."""

from __future__ import annotations

import os
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    TensorBoardLogger, CSVLogger = L.loggers.TensorBoardLogger, L.loggers.CSVLogger

    class Net(L.LightningModule):
        def __init__(self, lr: float = 0.1, layers: tuple[int, ...] = (4, 6)) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y)
            self.log("train_loss", loss)
            if isinstance(self.logger, TensorBoardLogger):
                self.logger.experiment.add_scalar("raw/loss", loss.item(), self.global_step)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", nn.functional.mse_loss(self.net(x), y))

        def on_validation_epoch_end(self) -> None:
            for logger in self.loggers:
                logger.log_metrics({"extra": float(self.current_epoch)}, step=self.global_step)

        def on_train_epoch_end(self) -> None:
            tensorboard = self.trainer.loggers[0].experiment
            for name, parameter in self.named_parameters():
                tensorboard.add_histogram(name, parameter, self.current_epoch)
            tensorboard.add_scalars("group", {"a": 1.0, "b": 2.0}, self.current_epoch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    def script(lab: Any) -> None:
        x = torch.randn(20, 3)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=5)
        loggers = [
            TensorBoardLogger(str(lab.folder), name="tb", version="first"),
            CSVLogger(str(lab.folder), name="csv"),
        ]
        trainer = lab.trainer(max_epochs=2, logger=loggers, log_every_n_steps=2)
        trainer.fit(Net(), loader, loader)
        folder = trainer.logger.log_dir
        lab.note("folder", os.path.relpath(folder, lab.folder))
        lab.note("names", [logger.name for logger in trainer.loggers])
        lab.note("versions", [logger.version for logger in trainer.loggers])
        read = EventAccumulator(str(folder)).Reload()
        for tag in read.Tags()["scalars"]:
            lab.note(f"tag {tag}", [(event.step, event.value) for event in read.Scalars(tag)])
        lab.note("histograms", sorted(read.Tags()["histograms"]))
        for path in sorted(lab.folder.rglob("events.out*")):
            path.unlink()  # they are named after the moment

    return script
