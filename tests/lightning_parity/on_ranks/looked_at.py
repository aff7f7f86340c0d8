"""Loaders that hooks ask the Trainer for: lengths, samplers and samples are those of the rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Marked(DataLoader[Any]):
    """A loader with something of its own."""

    mark = "of its own"


def look(loader: Any) -> list[Any]:
    sampler = loader.sampler
    seen = [type(loader).__name__, getattr(loader, "mark", None), len(loader), len(sampler), loader.batch_size]
    return [*seen, len(loader.dataset), loader.drop_last, loader.num_workers, getattr(sampler, "num_replicas", 1)]


def project(L: Any) -> Any:
    seen: list[Any] = []

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)
            self.logged = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_epoch_start(self) -> None:
            trainer = self.trainer
            several = trainer.val_dataloaders
            seen.append([self.current_epoch, look(trainer.train_dataloader), [look(one) for one in several]])
            seen.append([batch[0][:, 0].tolist() for batch in trainer.train_dataloader])
            seen.append([batch[0][:, 0].tolist() for one in several for batch in one])

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if batch_idx + 1 == len(self.trainer.val_dataloaders[dataloader_idx]):  # the rank's last one
                self.log("last", float(dataloader_idx))
                seen.append(self.trainer._results.DATALOADER_SUFFIX.format(dataloader_idx))

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if batch_idx == 0:
                seen.append([[name, look(one)] for name, one in self.trainer.test_dataloaders.items()])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def loader(samples: int, size: int, kind: Any = DataLoader, **options: Any) -> Any:
        x = torch.arange(2.0 * samples).view(samples, 2) / samples
        return kind(TensorDataset(x, torch.arange(samples) % 2), batch_size=size, **options)

    def script(lab: Any) -> None:
        L.seed_everything(3)
        trainer = lab.trainer(max_epochs=2)
        module = Module()
        trainer.fit(module, loader(12, 2, Marked, shuffle=True), [loader(8, 3), loader(6, 3, drop_last=True)])
        trainer.test(module, {"a": loader(4, 2), "b": loader(8, 4)})
        lab.note("seen", seen)

    return script
