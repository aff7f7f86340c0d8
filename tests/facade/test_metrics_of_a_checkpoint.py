"""A run that goes on from the end of an epoch begins with no metrics known, as Lightning's, checked before or not."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.facade.recorder import QUIET

HOOKS = [
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
]


def seen(library: str, folder: Path, anew: bool, **options: Any) -> list[str]:
    """What is known at each of the hooks of a run that goes on, of a new Trainer or the same."""
    L = importlib.import_module(library)
    found: list[str] = []

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch).mean()
            self.log("train", loss, on_step=True, on_epoch=True, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.layer(batch).mean(), prog_bar=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    class Looks(L.Callback):  # type: ignore[misc]
        pass

    def looks(hook: str) -> Any:
        def look(self: Any, trainer: Any, *rest: Any) -> None:
            known = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
            found.append(repr((hook, [sorted((name, round(float(v), 6)) for name, v in one.items()) for one in known])))

        return look

    for hook in HOOKS:
        setattr(Looks, hook, looks(hook))
    torch.manual_seed(0)
    data, validation = (DataLoader(torch.randn(size, 2), batch_size=2) for size in (6, 4))
    path = folder / library / "end.ckpt"
    settings = {**QUIET, "logger": False, "log_every_n_steps": 1, "num_sanity_val_steps": 0, "callbacks": [Looks()]}
    trainer = L.Trainer(**{**settings, "max_epochs": 1})
    module = Module()
    trainer.fit(module, data, validation)
    trainer.save_checkpoint(path)
    found.clear()
    if anew:
        trainer, module = L.Trainer(**{**settings, "max_epochs": 2, **options}), Module()
    else:
        trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data, validation, ckpt_path=path)
    return found


@pytest.mark.parametrize(
    ("anew", "options"),
    [
        (False, {}),
        (True, {}),
        (True, {"num_sanity_val_steps": 2}),
        (True, {"limit_val_batches": 0, "num_sanity_val_steps": 2}),
    ],
)
def test_nothing_is_known_before_it_is_logged(anew: bool, options: dict[str, Any], tmp_path: Path) -> None:
    theirs = seen("lightning.pytorch", tmp_path, anew, **options)
    assert seen("drivetrain.lightning", tmp_path, anew, **options) == theirs
    assert len(theirs) > 8
