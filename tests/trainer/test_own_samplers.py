"""A project's sampler that deals out the samples itself takes each rank's part of one order, whatever it draws."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, TensorDataset

from drivetrain import TrainModule
from tests.runs import seeded, train

SAMPLES = 24
DRAWS = {
    "numpy": lambda: np.random.permutation(SAMPLES).tolist(),
    "torch": lambda: torch.randperm(SAMPLES).tolist(),
    "python": lambda: random.sample(range(SAMPLES), SAMPLES),
}


class Own(Sampler[int]):
    """Every so many of an order that it draws from a global generator."""

    def __init__(self, draw: str) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        return iter(DRAWS[self.draw]()[dist.get_rank() :: dist.get_world_size()])

    def __len__(self) -> int:
        return SAMPLES // dist.get_world_size()


class Derived(DistributedSampler[int]):
    """The same, known as one that deals."""

    def __init__(self, draw: str) -> None:
        super().__init__(range(SAMPLES), num_replicas=2, rank=0)  # type: ignore[arg-type]
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        return iter(Own(self.draw))

    def __len__(self) -> int:
        return len(Own(self.draw))


class Noisy(TensorDataset):
    """Adds noise to what it reads, between two draws of the sampler's."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)[0], torch.rand(1) + float(np.random.rand()) + random.random()


class Reads(TrainModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.layer = folder, seeded(lambda: nn.Linear(1, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        values, noise = batch
        with open(self.folder / f"{self.trainer.current_epoch}-{self.trainer.global_rank}", "a") as stream:
            stream.writelines(f"{int(one)} {float(two)}\n" for one, two in zip(values, noise, strict=True))
        return self.layer(values.double()).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(kind: str, draw: str, workers: int = 0) -> DataLoader[Any]:
    data = Noisy(torch.arange(float(SAMPLES))[:, None])
    if kind == "batch_sampler":
        return DataLoader(data, batch_sampler=BatchSampler(Own(draw), 4, False), num_workers=workers)
    sampler = Derived(draw) if kind == "derived" else Own(draw)
    return DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("kind", ["sampler", "batch_sampler", "derived"])
def test_ranks_take_parts_of_one_order(kind: str, draw: str, workers: int, tmp_path: Path) -> None:
    train(
        lambda: Reads(tmp_path),
        "ddp",
        2,
        data=loader(kind, draw, workers),
        batch="per_process",
        use_distributed_sampler=kind == "derived",
    )
    orders = []
    for epoch in range(2):
        parts = [(tmp_path / f"{epoch}-{rank}").read_text().split("\n")[:-1] for rank in range(2)]
        samples = [[int(line.split()[0]) for line in part] for part in parts]
        assert sorted(samples[0] + samples[1]) == list(range(SAMPLES))
        assert len({line.split()[1] for part in parts for line in part}) == SAMPLES  # noise is each rank's own
        orders.append(samples)
    assert orders[0] != orders[1]


class Everybodys(Sampler[int]):
    """Draws of all samples, which it deals out to nobody."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randint(SAMPLES, (SAMPLES,)).tolist())

    def __len__(self) -> int:
        return SAMPLES


class Told(Reads):
    def on_fit_start(self) -> None:
        said = self.folder / "said"
        warnings.showwarning = lambda message, *rest: said.write_text(said.read_text() + str(message))  # type: ignore[assignment]
        warnings.simplefilter("always")


@pytest.mark.parametrize("deals", [False, True])
def test_a_sampler_that_deals_out_nothing_is_told(deals: bool, tmp_path: Path) -> None:
    """It draws the same on all ranks; the way out is one that helps, which batch=global does not."""
    (tmp_path / "said").write_text("")
    data = Noisy(torch.arange(float(SAMPLES))[:, None])
    own = Own("torch") if deals else Everybodys()
    fit: Any = {"batch": "per_process", "use_distributed_sampler": False}
    train(lambda: Told(tmp_path), "ddp", 2, data=DataLoader(data, batch_size=4, sampler=own), **fit)
    told = (tmp_path / "said").read_text()
    assert told.count("every rank draws the same samples") == (not deals)
    assert ("use_distributed_sampler=True" in told) == (not deals)
