"""Callbacks, loggers, profilers and the tuner as a script imports them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from drivetrain import Trainer, registry
from tests.runs import QUIET, Classifier, loader

MODULES = {"callbacks": "callbacks", "loggers": "loggers", "profilers": "profilers", "tuner": "tools"}


@pytest.mark.parametrize(("module", "group"), MODULES.items())
def test_what_is_registered_is_there_by_its_class(module: str, group: str) -> None:
    offered = importlib.import_module(f"drivetrain.{module}")
    for name in registry.names(group):
        kind = registry.entry(group, name).attr
        assert kind in dir(offered)
        if not name.startswith("lightning_") and name not in ("mlflow", "wandb"):  # those want their packages
            assert getattr(offered, kind) is registry.load(group, name)


def test_a_script_trains_with_them(tmp_path: Path) -> None:
    from drivetrain.callbacks import Callback, EarlyStopping, ModelCheckpoint
    from drivetrain.loggers import CSVLogger, Logger
    from drivetrain.profilers import SimpleProfiler

    checkpoint = ModelCheckpoint(dirpath=tmp_path / "kept", monitor="val/loss")
    stopping = EarlyStopping(monitor="val/loss", stopping_threshold=100.0)
    logger = CSVLogger(tmp_path)
    assert isinstance(stopping, Callback) and isinstance(logger, Logger)
    options = {**QUIET, "enable_checkpointing": True, "logger": logger, "profiler": SimpleProfiler()}
    trainer = Trainer(strategy="single", max_epochs=3, callbacks=[checkpoint, stopping], **options)
    trainer.fit(Classifier(), loader(), loader(shuffle=False))
    assert trainer.current_epoch == 1
    assert Path(checkpoint.best_model_path).exists()
    assert list(tmp_path.rglob("metrics.csv"))


def test_a_name_that_is_nearly_right() -> None:
    with pytest.raises(ImportError, match="cannot import name 'ModelCheckpont'"):
        from drivetrain.callbacks import ModelCheckpont  # noqa: F401
    with pytest.raises(AttributeError, match=r"no 'ModelCheckpont' in drivetrain\.callbacks: .*ModelCheckpoint"):
        importlib.import_module("drivetrain.callbacks").ModelCheckpont  # noqa: B018


@pytest.mark.parametrize("module", MODULES)
def test_a_star_stands_for_all_that_is_offered(module: str) -> None:
    brought: dict[str, object] = {}
    exec(f"from drivetrain.{module} import *", brought)
    assert sorted(set(brought) - {"__builtins__"}) == dir(importlib.import_module(f"drivetrain.{module}"))
