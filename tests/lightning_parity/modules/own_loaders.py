"""Loaders of a project's own that draw their order whenever they are asked for an iterator: one that is its own (as
mlcolvar's), one that makes one; in training, in several validations, asked for anew, tested and predicted over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class Itself:
    def __init__(self, batches: int) -> None:
        self.data, self.batches = torch.arange(4.0 * batches).view(-1, 1), batches

    def __iter__(self) -> Itself:
        self.order, self.next = torch.randperm(len(self.data)), 0
        return self

    def __next__(self) -> torch.Tensor:
        if self.next >= self.batches:
            raise StopIteration
        self.next += 1
        return self.data[self.order[4 * (self.next - 1) : 4 * self.next]]

    def __len__(self) -> int:
        return self.batches


class Making(Itself):
    def __iter__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        return iter(self.data[torch.randperm(len(self.data))].view(-1, 4, 1).unbind())


class Unsized:
    """A loader without a length."""

    def __init__(self) -> None:
        self.loader = Itself(3)

    def __iter__(self) -> Unsized:
        iter(self.loader)
        return self

    def __next__(self) -> torch.Tensor:
        return next(self.loader)


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if isinstance(batch, dict):
                batch = batch["a"] - batch["b"]
            loss = self.net(batch / 40).square().mean()
            self.log("loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("first", batch[0, 0])

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("tested", batch[0, 0])

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch + torch.rand(())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def script(lab: Any) -> None:
        cases: list[tuple[Any, Any, dict[str, Any]]] = [
            (Itself(5), Itself(3), {}),
            (Making(5), [Itself(3), Making(2)], {}),
            ({"a": Itself(5), "b": Making(3)}, Making(3), {"reload_dataloaders_every_n_epochs": 1}),
            (Unsized(), [Unsized(), Itself(2)], {"limit_train_batches": 2, "num_sanity_val_steps": 0}),
        ]
        for number, (train, val, options) in enumerate(cases):
            L.seed_everything(3)
            trainer = lab.trainer(max_epochs=3, log_every_n_steps=1, **options)
            module = Net()
            trainer.fit(module, train, val)
            trainer.test(module, Itself(3), verbose=False)
            lab.note(f"predicted {number}", trainer.predict(module, Making(2)))
            lab.note(f"drawn after {number}", float(torch.rand(())))

    return script
