"""A trainer that does no training: it counts steps and calls the hooks in the order of a fit.

``FakeTrainer.save_checkpoint`` makes a folder with a manifest; ``drivetrain.checkpoint`` is replaced by functions
that check what a callback may ask for: a link only to what is complete, a deletion only of what nothing points at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain import checkpoint
from drivetrain.callback import Callback
from drivetrain.errors import CheckpointError
from drivetrain.meanings import OWN, Meanings


class Ranks:
    """Communicator of one rank out of ``world_size``, whose peers send ``others``."""

    def __init__(self, rank: int = 0, first: Any = None) -> None:
        self.rank, self.first = rank, first
        self.world_size = 1 if first is None else 2

    def all_gather_plain(self, obj: Any) -> list[Any]:
        return [obj if self.rank == 0 else self.first, obj]


class RecordingLogger:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))


@dataclass
class Scheduled:
    scheduler: Any
    interval: str = "epoch"
    name: str | None = None
    monitor: str | None = None


@dataclass
class FakeTrainer:
    default_root_dir: Path
    callbacks: list[Callback] = field(default_factory=list)
    num_training_batches: int | float = 4
    num_val_batches: list[int] = field(default_factory=lambda: [2])
    num_test_batches: list[int] = field(default_factory=lambda: [3])
    max_epochs: int = 3
    val_check_interval: float = 1.0
    check_val_every_n_epoch: int | None = 1
    log_every_n_steps: int = 2
    log_dir: Path | None = None
    num_nodes: int = 1
    fast_dev_run: bool | int = False
    world_size: int = 1
    global_rank: int = 0
    current_epoch: int = 0
    global_step: int = 0
    stage: str | None = None
    sanity_checking: bool = False
    should_stop: bool = False
    agreed_seconds: float = 0.0
    last_batch_size: int = 8
    between_steps: bool = True
    meanings: Meanings = OWN
    communicator: Ranks = field(default_factory=Ranks)
    callback_metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    progress_bar_metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    lr_scheduler_configs: list[Scheduled] = field(default_factory=list)
    lightning_module: Any = None
    loggers: list[RecordingLogger] = field(default_factory=lambda: [RecordingLogger()])
    saved: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    on_save: Callable[[], None] = lambda: None
    ckpt_path: str | None = None
    meanings: Meanings = OWN

    @property
    def strategy(self) -> SimpleNamespace:
        return SimpleNamespace(communicator=self.communicator, everyone=self.communicator)

    def monitored(self, name: str) -> torch.Tensor | None:
        return self.callback_metrics.get(name)

    def log_falls_on(self, step: int) -> bool:
        return step % self.log_every_n_steps == 0

    @property
    def has_validation(self) -> bool:
        return bool(self.num_val_batches)

    @property
    def batches_stepped(self) -> int:
        return self.global_step

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def request_stop(self, reason: str) -> None:
        self.stops.append(reason)

    def save_checkpoint(self, path: Path, weights_only: bool = False) -> None:
        assert path.suffix == ".ckpt"
        self.on_save()
        if self.is_global_zero:
            path.mkdir(parents=True, exist_ok=True)
            (path / "manifest.json").write_text("{}")
            torch.save([callback.state_dict() for callback in self.callbacks], path / "callbacks.pt")
        self.saved.append(path.name)

    def log(self, **metrics: float) -> None:
        for name, value in metrics.items():
            self.callback_metrics[name] = torch.tensor(value, dtype=torch.float64)

    def call(self, hook: str, *arguments: Any) -> None:
        if hook == "setup":
            self.stage = arguments[0]
        for callback in self.callbacks:
            getattr(callback, hook)(self, None, *arguments)

    def validate_now(self, **metrics: float) -> None:
        self.call("on_validation_start")
        for index in range(sum(self.num_val_batches)):
            self.call("on_validation_batch_end", None, None, index)
        self.log(**metrics)
        self.call("on_validation_end")

    def fit(
        self,
        epochs: int,
        val: Callable[[int], dict[str, float]] = lambda epoch: {},
        train: Callable[[int], dict[str, float]] = lambda epoch: {},
        resume: str | Path | None = None,
    ) -> FakeTrainer:
        """``val(epoch)`` and ``train(epoch)`` are what validation and the training epoch log."""
        self.call("setup", "fit")
        if resume is not None:
            for callback, state in zip(self.callbacks, torch.load(Path(resume) / "callbacks.pt"), strict=True):
                callback.load_state_dict(state)
        self.call("on_fit_start")
        if self.num_val_batches:
            self.sanity_checking = True
            self.call("on_sanity_check_start")
            self.validate_now()
            self.call("on_sanity_check_end")
            self.sanity_checking = False
        self.call("on_train_start")
        for _ in range(epochs):
            self.call("on_train_epoch_start")
            for index in range(int(self.num_training_batches)):
                self.call("on_train_batch_start", None, index)
                self.global_step += 1
                self.call("on_train_batch_end", None, None, index)
                self.agreed_seconds += 1.0
            if self.num_val_batches:
                self.validate_now(**val(self.current_epoch))
            self.log(**train(self.current_epoch))
            self.call("on_train_epoch_end")
            self.current_epoch += 1
            if self.should_stop:
                break
        self.call("on_train_end")
        self.call("on_fit_end")
        self.call("teardown", "fit")
        return self


@pytest.fixture
def checkpoint_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def point_last(folder: str | Path, name: str) -> Path:
        assert (Path(folder) / name / "manifest.json").is_file(), "last may only point at what is complete"
        link = Path(folder) / "last.ckpt"
        if link.is_symlink():
            link.unlink()
        link.symlink_to(name)
        return link

    def remove(path: str | Path) -> None:
        path = Path(path)
        if path.name == "stuck.ckpt":
            raise CheckpointError(f"{path} cannot be removed")
        link = path.parent / "last.ckpt"
        assert not link.is_symlink() or os.readlink(link) != path.name, "last points at what is deleted"
        shutil.rmtree(path)

    monkeypatch.setattr(checkpoint, "point_last", point_last, raising=False)
    monkeypatch.setattr(checkpoint, "remove", remove, raising=False)


@pytest.fixture
def make_trainer(tmp_path: Path, checkpoint_folder: None) -> Callable[..., FakeTrainer]:
    def make(*callbacks: Callback, **attributes: Any) -> FakeTrainer:
        return FakeTrainer(tmp_path, list(callbacks), **attributes)

    return make


@pytest.fixture
def follower() -> Callable[[Any], Ranks]:
    """The communicator of rank 1, as a function of what rank 0 sends."""
    return lambda first: Ranks(1, first)
