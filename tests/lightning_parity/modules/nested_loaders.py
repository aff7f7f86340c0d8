"""Collections of collections of loaders, to train, validate, test and predict with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader


def rows(first: int, count: int) -> DataLoader[Any]:
    numbers = torch.arange(float(first), float(first + 2 * count)).reshape(count, 2) / 10
    return DataLoader(numbers, batch_size=2)  # type: ignore[arg-type]


NESTED: dict[str, Callable[[], Any]] = {
    "lists": lambda: [[rows(0, 4), rows(10, 6)], [rows(30, 2)]],
    "lists in a mapping": lambda: {"x": [rows(0, 4), rows(10, 6)], "y": rows(30, 2)},
    "mappings": lambda: {"x": {"p": rows(0, 4), "q": (rows(10, 6),)}, "y": rows(30, 2)},
    "tuples": lambda: ((rows(0, 4), rows(10, 6)), [rows(30, 2)]),
    "one": lambda: [[rows(0, 4)]],
}


def values(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: values(item) for name, item in batch.items()}
    return batch.tolist() if isinstance(batch, torch.Tensor) else [values(item) for item in batch]


def leaves(batch: Any) -> list[torch.Tensor]:
    items = batch.values() if isinstance(batch, dict) else batch
    return [batch] if isinstance(batch, torch.Tensor) else [leaf for item in items for leaf in leaves(item)]


def kinds(loaders: Any) -> Any:
    if isinstance(loaders, dict):
        return {name: kinds(item) for name, item in loaders.items()}
    if isinstance(loaders, (list, tuple)):
        return [type(loaders).__name__, *map(kinds, loaders)]
    return type(loaders).__name__


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(values(batch))
            return sum(self.net(leaf).square().mean() for leaf in leaves(batch))

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.seen.append((dataloader_idx, values(batch)))
            self.log("seen", batch.mean())

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("test", batch.mean())

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return batch + dataloader_idx

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def script(lab: Any) -> None:
        for name, loaders in NESTED.items():
            L.seed_everything(1)
            model, trainer = Net(), lab.trainer(max_epochs=1, logger=False, enable_checkpointing=False)
            trainer.fit(model, loaders(), loaders())
            lab.note(f"{name}: kept as", [kinds(trainer.train_dataloader), kinds(trainer.val_dataloaders)])
            lab.note(f"{name}: tested", trainer.test(model, loaders(), verbose=False))
            lab.note(f"{name}: predicted", trainer.predict(model, loaders()))
            lab.note(f"{name}: seen", model.seen)

    return script
