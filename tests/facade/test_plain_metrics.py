"""A project puts plain numbers among the Trainer's metrics: they are saved and come back."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.facade.recorder import QUIET

WAYS: dict[str, Callable[[Any], Any]] = {
    "callback": lambda trainer: trainer.callback_metrics.update({"mine": 0.1}),
    "logged": lambda trainer: trainer.logged_metrics.update({"mine": 0.1}),
    "connector": lambda trainer: trainer._logger_connector.log_metrics({"mine": 0.1}, step=1),
}


def module(L: Any, put: Callable[[Any], Any], **log: Any) -> Any:
    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch[0]).square().mean()
            if log:
                self.log("mine", loss, **log)
            return loss

        def on_train_batch_end(self, *arguments: Any) -> None:
            put(self.trainer)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Module()


def trained(library: str, folder: Path, module: Any, saver: Any, validates: bool = False, **options: Any) -> Any:
    L = importlib.import_module(library)
    logger = importlib.import_module(f"{library}.loggers").CSVLogger(folder)
    settings = {**QUIET, "enable_checkpointing": True, "max_epochs": 1, "callbacks": [saver], "logger": logger}
    trainer = L.Trainer(**{**settings, **options})
    loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
    trainer.fit(module, loader, loader if validates else None)
    return trainer


@pytest.mark.parametrize("library", ["lightning.pytorch", "drivetrain.lightning"])
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_beside_them(library: str, way: str, tmp_path: Path) -> None:
    L = importlib.import_module(library)
    saver = L.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2)
    trained(library, tmp_path, module(L, WAYS[way]), saver)
    assert Path(saver.best_model_path).exists()
    if library == "drivetrain.lightning":
        metrics = torch.load(saver.best_model_path, weights_only=True)["drivetrain"]["metrics"]
        assert metrics["callback" if way == "callback" else "logged"]["mine"] == 0.1 and "mine" in metrics["double"]


def test_one_that_ranks_had_agreed_upon_is_watched(tmp_path: Path) -> None:
    """Put over it in the second epoch, before they agree again; a validation then watches what they agreed upon."""
    L = importlib.import_module("drivetrain.lightning")
    watching = L.callbacks.EarlyStopping("mine", check_on_train_epoch_end=False, patience=9)
    made = module(L, WAYS["callback"], on_step=False, on_epoch=True, sync_dist=True)
    type(made).validation_step = lambda self, batch, batch_idx: None
    options = {"devices": 2, "strategy": "ddp", "val_check_interval": 1, "max_epochs": 2}
    trainer = trained("drivetrain.lightning", tmp_path, made, watching, validates=True, **options)
    assert trainer.global_step == 4 and float(watching.best_score) <= 0.1 + 1e-6
