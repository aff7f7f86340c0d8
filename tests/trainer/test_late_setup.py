"""After workers trained, the caller's data module and Trainer show the data that was read, as they do after training in
this process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from drivetrain import DataModule, Trainer, TrainModule, seed_everything


class Data(DataModule):
    def __init__(self) -> None:
        super().__init__()
        self.stages: list[str] = []
        self.test_set: Any = None

    def setup(self, stage: str) -> None:
        self.stages = [*self.stages, stage]
        everything = TensorDataset(torch.arange(40.0).reshape(20, 2))
        self.train_set, self.val_set = random_split(everything, [14, 6])
        self.test_set = TensorDataset(torch.randn(6, 2))

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_set, batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_set, batch_size=4)

    def test_dataloader(self) -> Any:
        return DataLoader(self.test_set, batch_size=4)

    @property
    def broken(self) -> Any:
        return self.nowhere


class Model(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).pow(2).mean() * 1e-6

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen = [*self.seen, *batch[0].tolist()]

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def fitted(devices: int) -> tuple[Trainer, Model, Data]:
    seed_everything(3)
    model, data = Model(), Data()
    trainer = Trainer(devices=devices, strategy="ddp", **OPTIONS)
    trainer.fit(model, datamodule=data)
    return trainer, model, data


def rows(loader: Any) -> list[list[float]]:
    return sorted(row for batch in loader for row in batch[0].tolist())


def test_the_same_parts_are_there_as_after_training_in_this_process() -> None:
    _, _, alone = fitted(1)
    trainer, model, data = fitted(2)
    drawn = torch.get_rng_state()
    assert data.val_set.indices == alone.val_set.indices
    assert data.train_set.indices == alone.train_set.indices
    assert torch.equal(torch.get_rng_state(), drawn), "what the script draws is not changed by a look at the data"
    assert all(row in rows(data.val_dataloader()) for row in model.seen)
    assert rows(trainer.val_dataloaders) == rows(data.val_dataloader())
    assert rows(trainer.train_dataloader) == rows(alone.train_dataloader())
    assert trainer.val_dataloaders is trainer.val_dataloaders


def test_a_loader_is_enough_where_the_attribute_was_none() -> None:
    _, _, alone = fitted(1)
    _, _, data = fitted(2)
    assert data.test_set is None and data.stages == ["fit"]
    assert rows(data.test_dataloader()) == rows(alone.test_dataloader())
    assert data.stages == ["fit", "fit"], "once in the workers, once here"
    assert rows(data.test_dataloader()) and data.stages == ["fit", "fit"]


def test_each_stage_that_ran_elsewhere_is_made_up_for() -> None:
    trainer, model, data = fitted(2)
    trainer.test(model, datamodule=data)
    assert data.stages == ["fit", "test"]
    copied = copy.deepcopy(data)
    for one in (data, copied):
        assert len(one.train_set) == 14
        assert one.stages == ["fit", "test", "fit", "test"]
    assert rows(trainer.test_dataloaders) and rows(trainer.train_dataloader)


def test_a_stage_in_this_process_is_not_made_up_for() -> None:
    _, model, data = fitted(2)
    Trainer(devices=1, **OPTIONS).validate(model, datamodule=data)
    assert data.stages == ["fit", "validate"]
    assert len(data.train_set) == 14 and rows(data.train_dataloader())
    assert data.stages == ["fit", "validate"]


def test_what_is_missing_is_said_as_before() -> None:
    _, _, data = fitted(2)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = data.nothing
    with pytest.raises(AttributeError, match="no attribute 'nowhere'"):
        _ = data.broken
    assert not hasattr(Data(), "train_set")


class WithData(Model):
    """Its own data, made in a setup that only workers ran."""

    def setup(self, stage: str) -> None:
        self.data = TensorDataset(torch.ones(8, 2))

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4)


def test_a_module_that_was_set_up_in_workers_is_not_asked() -> None:
    trainer = Trainer(devices=2, strategy="ddp", **OPTIONS)
    trainer.fit(WithData())
    assert trainer.train_dataloader is None and trainer.val_dataloaders is None


def test_loaders_that_were_given_are_shown() -> None:
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
    trainer = Trainer(devices=2, strategy="ddp", **OPTIONS)
    trainer.fit(Model(), loader, [loader])
    assert trainer.train_dataloader is loader
    assert trainer.val_dataloaders == [loader]
