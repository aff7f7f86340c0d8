"""The module, data and command line of a project, over the library that the environment names."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

LIBRARY = os.environ.get("COMMAND_LINE_LIBRARY", "drivetrain.lightning")
L: Any = importlib.import_module(LIBRARY)
cli: Any = importlib.import_module(f"{LIBRARY}.cli")
OptimizerCallable, LRSchedulerCallable = cli.OptimizerCallable, cli.LRSchedulerCallable


class Rows(Dataset[Tensor]):
    def __init__(self, count: int, seed: int) -> None:
        self.rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Data(L.LightningDataModule):  # type: ignore[misc]
    def __init__(self, count: int = 12, batch_size: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.count, self.batch_size, self.width = count, batch_size, 2 * batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(self.count, 1), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(self.count, 2), batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class Middle(nn.Module):
    def __init__(self, width: int = 3, act: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), act(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Wide(Middle):
    def __init__(self, factor: int = 2, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "width": kwargs.get("width", 3) * factor})


class Stage(L.LightningModule):  # type: ignore[misc]
    """What every module of the project does."""

    middle: Middle

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.middle(batch).square().mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("score", self.middle(batch).abs().mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.middle(batch)


class Net(Stage):
    def __init__(self, middle: Middle, lr: float = 0.1, width: int = 1, note: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.middle, self.lr, self.width, self.note = middle, lr, width, note

    def configure_optimizers(self) -> Any:
        if self.note and "class_path" in self.note:
            return cli.instantiate_class(self.parameters(), self.note)
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Bare(Stage):
    """Without optimizers of its own."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.middle = Middle(width)


class Callables(Bare):
    def __init__(
        self,
        optimizer: OptimizerCallable = torch.optim.Adam,
        scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.optimizer, self.scheduler = optimizer, scheduler

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}


def net_of(width: int = 4, lr: float = 0.2) -> Net:
    return Net(Middle(width), lr)


def short_trainer(max_epochs: int = 1, **kwargs: Any) -> L.Trainer:
    return L.Trainer(max_epochs=max_epochs, **kwargs)


class Counter(L.Callback):  # type: ignore[misc]
    def __init__(self, by: int = 1) -> None:
        self.by, self.steps = by, 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += self.by


class Told(cli.SaveConfigCallback):  # type: ignore[misc]
    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        text = self.parser.dump(self.config, skip_none=False)
        trainer.logger.log_hyperparams({"lines": len(text.splitlines()), "stage": stage})


class Line(cli.LightningCLI):  # type: ignore[misc]
    """With the parser of ``fit`` only: to make the others takes most of the time."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": cli.LightningCLI.subcommands()["fit"]}


class Linked(Line):
    """Uses what a subclass may."""

    diary: list[str]

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("data.width", "model.width", apply_on="instantiate")
        parser.add_optimizer_args(torch.optim.SGD, nested_key="chosen", link_to="model.note")
        parser.add_lightning_class_args(Counter, "counted")
        parser.link_arguments("data.batch_size", "counted.by")
        parser.add_argument("--tag", default="none")
        parser.set_defaults({"model.lr": 0.3, "chosen.lr": 0.05, "chosen.momentum": 0.5})

    def before_instantiate_classes(self) -> None:
        self.diary = ["before classes", str(hasattr(self, "model")), self._get(self.config, "tag")]

    def after_instantiate_classes(self) -> None:
        self.diary.append(f"after classes {self.model.width} {self.config_init[self.subcommand].tag}")

    def before_fit(self) -> None:
        self.diary.append("before fit")

    def after_fit(self) -> None:
        counted = next(callback for callback in self.trainer.callbacks if isinstance(callback, Counter))
        self.diary.append(f"after fit {self.trainer.global_step} {counted.steps}")


class Halved(Line):
    @staticmethod
    def configure_optimizers(lightning_module: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        for group in optimizer.param_groups:
            group["lr"] /= 2
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "interval": "step"}}


class OnlyFit(cli.LightningCLI):  # type: ignore[misc]
    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"}}

    def fit(self, model: Any, **kwargs: Any) -> None:
        self.given = sorted(kwargs)
        self.trainer.fit(model, **kwargs)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return super().instantiate_trainer(log_every_n_steps=1, **kwargs)


class Ambiguous(cli.LightningCLI):  # type: ignore[misc]
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_optimizer_args(torch.optim.SGD, "first")
        parser.add_optimizer_args((torch.optim.Adam,), "second")
