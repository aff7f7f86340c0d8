"""A run goes on within an epoch in which the shorter of several training loaders has begun again, or with a stream
whose next batch had been read, and drawn, before the checkpoint was made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import drivetrain.lightning as L
from tests.runs import QUIET

BATCHES, EPOCHS = 6, 2  # the shorter loader has two batches and begins twice more in an epoch


class Reads(L.LightningModule):
    """Draws, as dropout does, between what the loaders draw, and keeps what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.read: list[list[list[int]]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.read.append([part.tolist() for part in batch.values()])
        return (self.weight * torch.rand(1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Save(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def fit(seed: int, *callbacks: L.Callback, ckpt_path: Path | None = None) -> Reads:
    torch.manual_seed(seed)
    module = Reads()
    loaders = {
        "long": DataLoader(torch.arange(BATCHES * 2), batch_size=2, shuffle=True),
        "short": DataLoader(torch.arange(7), batch_size=4, shuffle=True),
    }
    return _train(module, loaders, callbacks, ckpt_path)


def _train(module: Reads, loaders: Any, callbacks: tuple[L.Callback, ...], ckpt_path: Path | None) -> Reads:
    options = {**QUIET, "strategy": "auto", "devices": 1, "max_epochs": EPOCHS}
    L.Trainer(callbacks=list(callbacks), **options).fit(module, loaders, ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("seed", [1, 2])
def test_the_batches_of_the_undisturbed_run(seed: int, tmp_path: Path) -> None:
    whole = fit(1, Save(tmp_path))
    assert len(whole.read) == BATCHES * EPOCHS
    for step in range(1, BATCHES * EPOCHS):
        resumed = fit(seed, ckpt_path=tmp_path / f"{step}.ckpt")
        assert resumed.read == whole.read[step:], step
        assert torch.equal(resumed.weight, whole.weight), step


class Drawn(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(BATCHES * 2):
            yield torch.rand(1)


def test_a_stream_that_draws_what_it_gives(tmp_path: Path) -> None:
    def stream(*callbacks: L.Callback, ckpt_path: Path | None = None) -> Reads:
        torch.manual_seed(1)
        return _train(Reads(), {"stream": DataLoader(Drawn(), batch_size=2)}, callbacks, ckpt_path)

    whole = stream(Save(tmp_path))
    for step in range(1, BATCHES * EPOCHS):
        resumed = stream(ckpt_path=tmp_path / f"{step}.ckpt")
        assert resumed.read == whole.read[step:], step
        assert torch.equal(resumed.weight, whole.weight), step
