"""A training run with everything that has a state, and the comparison of two such runs to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import Callback, Trainer, TrainModule, checkpoint
from drivetrain.seeding import seed_everything
from drivetrain_plugins.callbacks.early_stopping import EarlyStopping
from drivetrain_plugins.callbacks.model_checkpoint import ModelCheckpoint
from tests.runs import QUIET, dataset, loader, seeded

END = "end.ckpt"
DEPENDS_ON_PLACE = ("dirpath", "best_model_path", "best_k_models", "kth_best_model_path", "last_model_path")


class Everything(TrainModule):
    """Dropout, AdamW, a schedule by step, one that watches a metric, and epoch means."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.net = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/worst", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("train/samples", len(y), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/loss", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        by_step = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        by_metric = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return [optimizer], [
            {"scheduler": by_step, "interval": "step"},
            {"scheduler": by_metric, "monitor": "val/loss"},
        ]


class Noisy(Dataset[Any]):
    """Samples with random noise from torch, and from numpy."""

    def __init__(self, samples: int = 18) -> None:
        self.data = dataset(samples)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + 0.1 * torch.randn(x.shape, dtype=x.dtype) + 0.1 * np.random.rand(), y


class NoisyStream(IterableDataset[Any]):
    """Noisy samples of unknown number; each worker process reads its part of them."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        data = Noisy()
        for index in range(info.id if info else 0, len(data), info.num_workers if info else 1):
            yield data[index]


class Save(Callback):
    """Saves at the named moments, each under its name and number."""

    saves_checkpoints = True
    monitors = True

    def __init__(self, folder: Path, *moments: str) -> None:
        self.folder, self.moments = folder, moments
        self.made: list[Path] = []

    def _at(self, moment: str, trainer: Trainer) -> None:
        if moment in self.moments and trainer.between_steps and not trainer.sanity_checking:
            path = self.folder / f"{trainer.global_step}-{moment}-{trainer.current_epoch}.ckpt"
            if not path.exists():
                trainer.save_checkpoint(path)

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        self._at("batch", trainer)

    def on_validation_end(self, trainer: Trainer, *rest: Any) -> None:
        self._at("validation", trainer)

    def on_train_epoch_end(self, trainer: Trainer, *rest: Any) -> None:
        self._at("epoch", trainer)

    def on_train_end(self, trainer: Trainer, *rest: Any) -> None:
        trainer.save_checkpoint(self.folder / END)


def noisy_loader(workers: int = 0, batch_size: int = 4) -> DataLoader[Any]:
    """18 samples in batches of 4: the last batch is short, and so is the last window of 2."""
    return DataLoader(Noisy(), batch_size=batch_size, shuffle=True, num_workers=workers)


def fit(
    folder: Path,
    *moments: str,
    module: TrainModule | None = None,
    data: Any = None,
    validation: bool = True,
    resume: str | Path | None = None,
    **options: Any,
) -> Path:
    """Train two epochs in ``folder``; returns the folder. What the run ended with lies in ``END`` there."""
    settings: dict[str, Any] = {
        "strategy": "single",
        "devices": 1,
        "precision": "64-true",
        "max_epochs": 2,
        "seed": 5,
        "accumulate_grad_batches": 2,
        "val_check_interval": 2,
        "log_every_n_steps": 3,
        "num_sanity_val_steps": 1,
        **options,
    }
    callbacks: list[Callback] = [Save(folder, *moments)]
    if validation:
        callbacks += [
            EarlyStopping("val/loss", patience=9),
            ModelCheckpoint(folder / "best", monitor="val/loss", save_top_k=2, filename="{step}"),
        ]
    else:
        settings.pop("val_check_interval")
    trainer = Trainer(**{**QUIET, "enable_checkpointing": None, **settings, "callbacks": callbacks})
    seed_everything(11)
    trainer.fit(
        module or Everything(),
        data if data is not None else noisy_loader(),
        loader(7, 3, shuffle=False) if validation else None,
        ckpt_path=resume,
    )
    return folder


def end(folder: Path, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """All that the run ended with, as its last checkpoint holds it."""
    loaded = checkpoint.load(folder / END, rank=rank, world_size=world_size)
    state = {name: value for name, value in loaded.shared.items() if name != "drivetrain_version"}
    state["own"] = loaded.own
    return state


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """The places at which two states are not equal to the last bit; clocks and folders apart."""
    if where.endswith((".seconds", *DEPENDS_ON_PLACE)):
        return []
    if type(a) is not type(b):
        return [f"{where}: {a!r} and {b!r}"]
    if isinstance(a, dict):
        found = [f"{where}: keys {sorted(map(str, a.keys() ^ b.keys()))}"] if a.keys() != b.keys() else []
        return found + [line for key in a.keys() & b.keys() for line in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{where}: {len(a)} and {len(b)} items"]
        pairs = enumerate(zip(a, b, strict=True))
        return [line for i, (x, y) in pairs for line in differences(x, y, f"{where}[{i}]")]
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [f"{where}: {a} and {b}"[:200]]
    if isinstance(a, np.ndarray):
        return [] if np.array_equal(a, b) else [f"{where}: arrays differ"]
    return [] if a == b else [f"{where}: {a!r} and {b!r}"]


def assert_same(a: Path, b: Path, world_size: int = 1, best: bool = True) -> None:
    """``best``: whether the second run went on in the folder of the first, so that it knows its best checkpoints."""
    for rank in range(world_size):
        states = [end(folder, rank, world_size) for folder in (a, b)]
        for state in states if not best else []:
            state["callbacks"] = {key: value for key, value in state["callbacks"].items() if "Checkpoint" not in key}
        found = differences(*states)
        assert not found, "\n".join(found[:10])
