"""Paths that a project gives: ``~`` is the user's folder wherever one is taken, an address is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import drivetrain.lightning as L
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.lightning.demos.boring_classes import BoringModel
from drivetrain.lightning.loggers import CSVLogger, TensorBoardLogger
from drivetrain.lightning.profilers import SimpleProfiler
from tests.facade.recorder import QUIET

SHORT = {**QUIET, "max_steps": 1, "limit_val_batches": 0, "enable_checkpointing": True}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(away)
    return home


def fitted(**options: Any) -> L.Trainer:
    trainer = L.Trainer(**{**SHORT, **options})
    trainer.fit(BoringModel())
    return trainer


def test_the_users_folder(home: Path) -> None:
    for version in (0, 1):  # the second run counts what the first one left
        for options, folder in (
            ({"default_root_dir": "~/root", "logger": None}, "root"),
            ({"logger": CSVLogger("~/csv")}, "csv"),
            ({"logger": TensorBoardLogger("~/tb")}, "tb"),
        ):
            trainer = fitted(**options)
            run = home / folder / "lightning_logs" / f"version_{version}"
            assert trainer.log_dir == str(run)
            assert trainer.checkpoint_callback.best_model_path == str(run / "checkpoints" / "epoch=0-step=1.ckpt")
    trainer = fitted(default_root_dir="~/none", logger=False, profiler=SimpleProfiler("~/profile", "times"))
    assert trainer.default_root_dir == str(home / "none")
    assert (home / "profile" / "fit-times.txt").is_file()
    trainer.save_checkpoint("~/by_hand.ckpt")
    assert (home / "by_hand.ckpt").is_file()
    BoringModel.load_from_checkpoint("~/by_hand.ckpt")
    trainer = L.Trainer(**{**SHORT, "max_steps": 2, "logger": False})
    trainer.fit(BoringModel(), ckpt_path="~/by_hand.ckpt")
    assert trainer.global_step == 2
    assert [path.name for path in (home.parent / "away").iterdir()] == ["checkpoints"], "of the last Trainer"


@pytest.mark.parametrize(
    ("what", "use"),
    [
        ("default_root_dir", lambda address: L.Trainer(default_root_dir=address)),
        ("save_dir", CSVLogger),
        ("save_dir", TensorBoardLogger),
        ("dirpath", ModelCheckpoint),
        ("dirpath", OnExceptionCheckpoint),
        ("dirpath", SimpleProfiler),
        ("filepath", lambda address: fitted(enable_checkpointing=False).save_checkpoint(address)),
    ],
)
def test_an_address(what: str, use: Callable[[str], Any], home: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"^{what}='s3://bucket/run' is an address, .*: name a folder"):
        use("s3://bucket/run")
    assert not [path for path in (home.parent / "away").iterdir() if path.name.startswith("s3")]


def test_an_address_to_read_from() -> None:
    with pytest.raises(CheckpointError, match=r"^s3://bucket/x.* is an address, not a file: download it"):
        BoringModel.load_from_checkpoint("s3://bucket/x.ckpt")


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
@pytest.mark.parametrize("devices", [1, 2])
def test_an_address_that_a_logger_names_later_is_refused_before_workers_start(
    kind: Any, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere(kind):  # type: ignore[misc]
        save_dir = "s3://bucket/runs"

    def start(*args: Any, **options: Any) -> None:
        raise AssertionError("workers were started")

    monkeypatch.setattr("drivetrain.handover.launch", start)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="save_dir='s3://bucket/runs' is an address, and what a run leaves"):
        fitted(logger=Elsewhere(tmp_path), devices=devices, strategy="ddp")
    assert list(tmp_path.iterdir()) == []
