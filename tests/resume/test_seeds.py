"""A run goes on with the order and the augmentation of the run that was saved, whatever the new process's seed is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import Callback, Trainer, TrainModule
from tests.runs import QUIET

START = "the data keeps the order of the run that goes on"
SAVED_AT = 4  # in the second epoch, of three batches


class Augmented(Dataset[Tensor]):
    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Tensor:
        return torch.sin(torch.arange(3.0, dtype=torch.float64) * index) + torch.rand(3, dtype=torch.float64)


class Reads(TrainModule):
    """A line whose validation, of half of the data in a drawn order, is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1, dtype=torch.float64)
        with torch.no_grad():
            self.net.weight.fill_(0.5)
            self.net.bias.zero_()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/mean", batch.mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


class Save(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.path)


def run(
    seed: int, workers: int, ckpt_path: Path | None = None, trainer_seed: int | None = None, **options: Any
) -> tuple[Tensor, Any]:
    def shuffled() -> DataLoader[Tensor]:
        return DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers)

    torch.manual_seed(seed)
    module = Reads()
    limits = {"limit_train_batches": 3, "limit_val_batches": 2, "num_sanity_val_steps": 0, "max_epochs": 3}
    trainer = Trainer(precision="64-true", seed=trainer_seed, **limits, **QUIET, **options)
    trainer.fit(module, shuffled(), shuffled(), ckpt_path=ckpt_path)
    return module.net.weight.detach(), trainer.callback_metrics["val/mean"]


def _seeded_otherwise(folder: Path, strategy: str, devices: int, workers: int) -> None:
    job: dict[str, Any] = {"strategy": strategy, "devices": devices}
    whole = run(1, workers, callbacks=[Save(folder / "at")], **job)
    other = run(2, workers, **job)
    assert not torch.equal(whole[0], other[0]) and whole[1] != other[1]
    resumed = run(2, workers, ckpt_path=folder / "at", **job)
    assert torch.equal(whole[0], resumed[0]) and whole[1] == resumed[1]


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2)])
def test_a_script_that_is_seeded_otherwise(strategy: str, devices: int, tmp_path: Path) -> None:
    _seeded_otherwise(tmp_path, strategy, devices, workers=0)


def test_loader_processes_augment_as_they_did(tmp_path: Path, run_alone: Callable[..., Any]) -> None:
    run_alone(_seeded_otherwise, tmp_path, "single", 1, 2)


@pytest.mark.parametrize("given", [1, 2])
def test_another_seed_that_is_given_is_told_of(given: int, tmp_path: Path) -> None:
    whole = run(9, 0, strategy="single", callbacks=[Save(tmp_path / "at")], trainer_seed=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        resumed = run(9, 0, strategy="single", ckpt_path=tmp_path / "at", trainer_seed=given)
    assert torch.equal(whole[0], resumed[0]) and whole[1] == resumed[1]
    said = [str(one.message) for one in told if START in str(one.message)]
    assert said == ([f"{START}, which has seed=1: seed=2 is not its."] if given == 2 else [])
