"""Training loaders that each rank reads as they are and that give less than they say, on all ranks alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

ROWS = torch.arange(36.0).reshape(12, 3) / 36


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS[:8])

    def __len__(self) -> int:
        return len(ROWS)


class Fewer:
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS[:8].split(2))

    def __len__(self) -> int:
        return 6


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 1)
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen.append((batch_idx, self.global_step, self.trainer.is_last_batch, float(batch.sum())))
            loss = self.net(batch).square().mean()
            self.log("loss", loss, sync_dist=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(("validated", self.global_step))

        def on_train_epoch_end(self) -> None:
            self.seen.append(("ended", self.current_epoch, self.global_step))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def script(lab: Any) -> None:
        for number, loader in enumerate((DataLoader(Stream(), batch_size=2), Fewer())):
            L.seed_everything(4)
            model = Net()
            trainer = lab.trainer(max_epochs=2, num_sanity_val_steps=0)
            trainer.fit(model, loader, DataLoader(ROWS, batch_size=6))  # type: ignore[arg-type]
            lab.note(f"seen by {number}", model.seen)

    return script
