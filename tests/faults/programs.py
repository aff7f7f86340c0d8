"""Training programs that run as a process of their own, so that it can be interrupted and killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from drivetrain import Callback, Trainer
from drivetrain.seeding import seed_everything
from drivetrain_plugins.callbacks.model_checkpoint import ModelCheckpoint
from tests.resume.runs import Everything, Save, noisy_loader
from tests.runs import QUIET, loader


class Slow(Callback):
    """Makes a moment last, and leaves a mark in ``folder`` when it begins."""

    def __init__(self, folder: Path | str, moment: str, step: int, seconds: float = 0.15) -> None:
        self.folder, self.moment, self.step, self.seconds = Path(folder), moment, step, seconds

    def _at(self, moment: str, trainer: Trainer) -> None:
        if moment == self.moment and trainer.global_step >= self.step:
            (self.folder / f"reached_{trainer.global_rank}").touch()
            time.sleep(self.seconds)

    def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
        self._at("train", trainer)

    def on_validation_batch_start(self, trainer: Trainer, *rest: Any) -> None:
        self._at("sanity" if trainer.sanity_checking else "validation", trainer)


def train(
    folder: Path,
    strategy: str,
    devices: int,
    *more: Callback,
    resume: str | None = None,
    keep: int = 1,
    **options: Any,
) -> None:
    """The run of ``tests.resume`` with a checkpoint every 2 steps (``keep``: as ``save_top_k``), to its end."""
    settings: dict[str, Any] = {
        "max_epochs": 4,
        "accumulate_grad_batches": 2,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 2,
        **options,
    }
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": None},
        strategy=strategy,
        devices=devices,
        precision="64-true",
        seed=5,
        default_root_dir=folder,
        callbacks=[
            *more,
            Save(folder),
            ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_last=True, save_top_k=keep),
        ],
        **settings,
    )
    seed_everything(11)
    trainer.fit(Everything(), noisy_loader(), loader(7, 3, shuffle=False), ckpt_path=resume)
