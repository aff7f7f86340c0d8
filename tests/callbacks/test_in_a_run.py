"""Callbacks, loggers and precision in a real run: fit, test the best, resume."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import checkpoint
from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError
from drivetrain.module import TrainModule
from drivetrain.trainer import Trainer
from drivetrain_plugins.callbacks.early_stopping import EarlyStopping
from drivetrain_plugins.callbacks.learning_rate_monitor import LearningRateMonitor
from drivetrain_plugins.callbacks.lightning_model_checkpoint import ModelCheckpoint as OfLightning
from drivetrain_plugins.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain_plugins.callbacks.throughput_monitor import ThroughputMonitor
from drivetrain_plugins.callbacks.timer import Timer
from drivetrain_plugins.loggers.csv import CSVLogger
from drivetrain_plugins.loggers.tensorboard import TensorBoardLogger
from tests.runs import train


class Regression(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.example_input_array = torch.ones(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return ((self(batch[0]) - batch[1]) ** 2).mean()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch), prog_bar=True)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test/loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.fixture
def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    x = torch.randn(70, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def trainer(
    root: Path, callbacks: list[Callback], epochs: int, precision: str = "32-true", **options: object
) -> Trainer:
    return Trainer(
        strategy="single",
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=callbacks,
        precision=precision,
        default_root_dir=root,
        log_every_n_steps=4,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true"])
def test_fit_test_resume(
    tmp_path: Path, loader: DataLoader[tuple[torch.Tensor, ...]], precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ranked = ModelCheckpoint(monitor="val/loss", save_last=True, save_top_k=2)
    late = ModelCheckpoint(monitor="loss_epoch", filename="{epoch}", dirpath=tmp_path / "late")
    others = [EarlyStopping("val/loss"), LearningRateMonitor(), ThroughputMonitor(), Timer()]
    loggers = [CSVLogger(tmp_path, name="csv", version=0), TensorBoardLogger(tmp_path, name="tb", version="")]
    run = trainer(tmp_path, [ranked, late, *others], 3, precision, logger=loggers)
    module = Regression()
    run.fit(module, loader, loader)
    step = run.global_step
    kept = [f"epoch={epoch}-step={step - 9 * (2 - epoch)}.ckpt" for epoch in (1, 2)]
    folder = Path(loggers[0].log_dir) / "checkpoints"
    assert sorted(os.listdir(folder)) == [*kept, "last.ckpt"]
    assert os.readlink(folder / "last.ckpt") == kept[-1]
    assert checkpoint.newest(folder) == folder / kept[-1]
    assert os.listdir(tmp_path / "late") == ["epoch=2.ckpt"]
    shown = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in shown if line.startswith("epoch")] == [f"epoch {n}/3" for n in (1, 2, 3)]
    run.test(module, loader, ckpt_path="best")
    assert "test metrics" in capsys.readouterr().out
    for logger in loggers:
        logger.finalize("completed")
    with loggers[0].metrics_file_path.open(newline="") as file:
        columns = {name for row in csv.DictReader(file) for name, value in row.items() if value}
    assert {"loss_step", "loss_epoch", "val/loss", "test/loss", "lr-Adam", "samples_per_second"} <= columns

    again = ModelCheckpoint(dirpath=folder, monitor="val/loss", save_last=True, save_top_k=2)
    resumed = trainer(tmp_path, [again], 5, precision, logger=False)
    resumed.fit(Regression(), loader, loader, ckpt_path="last")
    origin = kept[-1]  # what was resumed from is never deleted
    kept = [f"epoch={epoch}-step={step + 9 * (epoch - 2)}.ckpt" for epoch in (3, 4)]
    assert sorted(os.listdir(folder)) == [origin, *kept, "last.ckpt"]
    assert os.readlink(folder / "last.ckpt") == kept[-1]


@pytest.mark.parametrize(("kind", "devices"), [(ModelCheckpoint, 1), (ModelCheckpoint, 2), (OfLightning, 1)])
def test_a_subclass_names_the_files(kind: Any, devices: int, tmp_path: Path) -> None:
    class Named(kind):  # type: ignore[misc]
        def format_checkpoint_name(self, metrics: Any, filename: Any = None, ver: Any = None, **more: Any) -> str:
            name = f"of-{int(metrics['step'])}" if ver is None else f"of-{int(metrics['step'])}-{ver}"
            return str(Path(self.dirpath or "") / f"{name}.ckpt")

    saving = Named(tmp_path, save_top_k=-1, save_on_train_epoch_end=True)
    strategy = "single" if devices == 1 else "ddp"
    train(strategy=strategy, devices=devices, callbacks=[saving], enable_checkpointing=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of-14.ckpt", "of-7.ckpt"]
    assert saving.best_model_path == str(tmp_path / "of-14.ckpt")


@pytest.mark.parametrize("kind", [ModelCheckpoint, OfLightning])
def test_a_name_that_is_the_same_in_each_version_is_refused_and_not_tried_for_ever(kind: Any, tmp_path: Path) -> None:
    class Same(kind):  # type: ignore[misc]
        def format_checkpoint_name(self, *args: Any, **options: Any) -> str:
            return str(tmp_path / "same.ckpt")

    with pytest.raises(ConfigurationError, match=r"gives .*same\.ckpt again where that is taken"):
        train(callbacks=[Same(tmp_path, monitor="train/loss", save_top_k=-1)], enable_checkpointing=True)
