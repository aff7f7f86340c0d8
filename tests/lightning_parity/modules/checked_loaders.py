"""Validation data that draw random numbers, over two loaders, checked before training and asked for again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset[Any]):
    """Samples that are augmented as they are read; ``read`` counts them."""

    def __init__(self, samples: int) -> None:
        self.samples, self.read = samples, 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return torch.full((4,), index / self.samples) + torch.randn(4), torch.tensor(index % 2)


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.asked, self.sums, self.checked = nn.Linear(4, 2), [], [], []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.sums.append((self.trainer.sanity_checking, dataloader_idx, batch[0].sum().item()))
            self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            self.asked.append(("train", self.trainer.current_epoch))
            return DataLoader(Noisy(12), batch_size=4, shuffle=True)

        def val_dataloader(self) -> Any:
            self.asked.append(("val", self.trainer.current_epoch))
            self.sets = [Noisy(14), Noisy(11)]
            return [DataLoader(data, batch_size=4) for data in self.sets]

    def script(lab: Any) -> None:
        class Check(L.Callback):
            def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
                pl_module.checked = [data.read for data in pl_module.sets]

        for name, options in {
            "each": {"check_val_every_n_epoch": 1},
            "second": {"check_val_every_n_epoch": 2},
            "third": {"check_val_every_n_epoch": 3, "num_sanity_val_steps": 1},
            "within": {"val_check_interval": 2},
            "unchecked": {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0},
        }.items():
            for every in (0, 1, 2):
                module, given = Net(), {**options, "reload_dataloaders_every_n_epochs": every}
                lab.trainer(max_epochs=6, callbacks=[Check()], **given).fit(module)
                for fact in ("asked", "sums", "checked"):
                    lab.note(f"{name} {every} {fact}", getattr(module, fact))

    return script
