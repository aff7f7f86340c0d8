"""What looks like an oversight is told, where Lightning tells it."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as theirs
import pytest
import torch

import drivetrain.lightning as ours
from tests.facade.recorder import QUIET, loader, module


def fit(L: Any, project: Any, folder: Path, val: Any = None, ckpt_path: Any = None, **flags: Any) -> Any:
    given = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "default_root_dir": str(folder)}
    trainer = L.Trainer(**{**QUIET, **given, **flags})
    trainer.fit(project, loader(), val, ckpt_path=ckpt_path)
    return trainer


def no_limit(L: Any, folder: Path) -> None:
    def stop(self: Any) -> None:
        self.trainer.should_stop = True

    fit(L, module(L, on_train_start=stop), folder, max_epochs=None)


def no_step(L: Any, folder: Path) -> None:
    fit(L, module(L), folder, val=loader())


def no_data(L: Any, folder: Path) -> None:
    fit(L, module(L, validation_step=lambda *_: None), folder)


def rare_logs(L: Any, folder: Path) -> None:
    loggers = importlib.import_module(f"{L.__name__}.loggers")
    fit(L, module(L), folder, logger=loggers.CSVLogger(str(folder)), log_every_n_steps=1000)


def no_optimizer(L: Any, folder: Path) -> None:
    fit(L, module(L, configure_optimizers=lambda self: None), folder)


def resting(L: Any, folder: Path) -> None:
    project = module(L)
    project.net.eval()
    fit(L, project, folder)


def log_without_trainer(L: Any, folder: Path) -> None:
    module(L).log("loss", 1.0)


def shuffled(L: Any, folder: Path) -> None:
    data = torch.utils.data.DataLoader(loader().dataset, shuffle=True)
    given = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "default_root_dir": str(folder)}
    L.Trainer(**{**QUIET, **given, "overfit_batches": 2}).fit(module(L), data)


def shuffled_evaluation(L: Any, folder: Path) -> None:
    data = torch.utils.data.DataLoader(loader().dataset, shuffle=True)
    trainer = L.Trainer(**{**QUIET, "accelerator": "cpu", "devices": 1, "default_root_dir": str(folder)})
    trainer.validate(module(L, validation_step=lambda *_: None), data)


def lost_callback(L: Any, folder: Path) -> None:
    keeper = type("Keeper", (L.Callback,), {"state_dict": lambda self: {"kept": 1}})()
    path = folder / "kept.ckpt"
    fit(L, module(L), folder, callbacks=[keeper]).save_checkpoint(path)
    fit(L, module(L), folder, ckpt_path=path, max_epochs=2)


# Of each: a word that both say, and whether it is of the kind that projects silence together.
HINTS: list[tuple[Callable[[Any, Path], None], str, bool]] = [
    (no_limit, "max_epochs", True),
    (no_step, "validation_step", False),
    (no_data, "validation_step", True),
    (rare_logs, "log_every_n_steps", True),
    (no_optimizer, "None", False),
    (resting, "mode", True),
    (log_without_trainer, "self.log", False),
    (shuffled, "overfit", False),
    (shuffled_evaluation, "shuffl", True),
    (lost_callback, "Keeper", False),
]


@pytest.mark.parametrize("L", [theirs, ours], ids=["lightning", "drivetrain"])
@pytest.mark.parametrize(("does", "word", "possible"), HINTS, ids=[hint[0].__name__ for hint in HINTS])
def test_an_oversight_is_told(
    L: Any, does: Callable[[Any, Path], None], word: str, possible: bool, tmp_path: Path
) -> None:
    kind = importlib.import_module(
        "drivetrain.lightning.fabric.utilities.warnings" if L is ours else "lightning.fabric.utilities.warnings"
    ).PossibleUserWarning
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        does(L, tmp_path)
    found = [one for one in told if word in str(one.message) and issubclass(one.category, UserWarning)]
    assert found, [str(one.message) for one in told]
    if possible:
        assert any(issubclass(one.category, kind) for one in found)
