"""Under torchrun each rank runs the script, and may come to other names: the first rank's count, and nobody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import drivetrain
import drivetrain.lightning
from drivetrain import Callback, checkpoint
from drivetrain.checkpoint import load
from drivetrain_plugins.callbacks.lightning_model_checkpoint import ModelCheckpoint as OfLightning
from drivetrain_plugins.callbacks.model_checkpoint import ModelCheckpoint
from tests.checkpoint.ranks import GlooCommunicator, run_ranks
from tests.distributed import run_job
from tests.runs import QUIET, Classifier, loader

SECONDS = 20.0  # that a collective waits: those who wait for each other fail then
FACES: dict[str, Any] = {"drivetrain": drivetrain, "lightning": drivetrain.lightning}


def trainer(face: str, strategy: str, folder: Path, *callbacks: Callback, **options: Any) -> Any:
    settings = {**QUIET, "enable_checkpointing": None, "max_epochs": 4, "num_sanity_val_steps": 0, **options}
    return FACES[face].Trainer(
        strategy=strategy, devices=2, precision="64-true", default_root_dir=folder, timeout=SECONDS,
        callbacks=list(callbacks), **settings,
    )  # fmt: skip


def test_the_first_ranks_folder_counts(tmp_path: Path) -> None:
    def write(rank: int, world_size: int) -> str:
        return str(checkpoint.save(tmp_path / f"{rank}" / "c", {"a": 1}, {"r": rank}, communicator=GlooCommunicator()))

    assert run_ranks(write, 2) == [str(tmp_path / "0" / "c")] * 2
    assert load(tmp_path / "0" / "c", rank=1, world_size=2).own == {"r": 1}
    assert not (tmp_path / "1").exists()


class Saves(Callback):
    """Under a name that no other rank has, in a folder of its own."""

    saves_checkpoints = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, *rest: Any) -> None:
        trainer.save_checkpoint(self.folder / str(trainer.global_rank) / f"{trainer.current_epoch}.ckpt")


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
@pytest.mark.parametrize("face", FACES)
def test_saved_by_hand(face: str, strategy: str, tmp_path: Path) -> None:
    trainer(face, strategy, tmp_path, Saves(tmp_path), max_epochs=2, batch="global").fit(Classifier(), loader())
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("?/*")} == {"0/0.ckpt", "0/1.ckpt"}
    assert checkpoint.resolve(tmp_path / "0" / "1.ckpt", tmp_path) is not None


class Worse(Classifier):
    """What is monitored grows from epoch to epoch."""

    def on_train_epoch_end(self) -> None:
        self.log("grows", float(self.current_epoch))


class Renamed(OfLightning):
    """Names its files anew for each."""

    rank = 0

    def format_checkpoint_name(self, metrics: Any, *rest: Any, **more: Any) -> str:
        if self.rank == 0:
            return super().format_checkpoint_name(metrics, *rest, **more)
        return str(Path(self.dirpath or "") / f"{self.rank}.ckpt")


@pytest.mark.parametrize("kind", [ModelCheckpoint, OfLightning, Renamed])
def test_files_of_a_callback(kind: Any, tmp_path: Path) -> None:
    """One rank's names are all different and the other's all the same: they would keep other numbers of files."""

    def work(rank: int, world_size: int) -> list[str]:
        filename = "same" if rank == 1 else "{epoch}"
        saving = kind(
            tmp_path / str(rank), None if kind is Renamed else filename, "grows", save_top_k=2,
            enable_version_counter=kind is Renamed, save_on_train_epoch_end=True,
        )  # fmt: skip
        if kind is Renamed:
            saving.rank = rank
        face = "drivetrain" if kind is ModelCheckpoint else "lightning"
        trainer(face, "ddp", tmp_path / "run", saving).fit(Worse(), loader(16))
        return sorted(saving.best_k_models)

    first, second = run_job(work, 2)
    assert first == second
    assert {str(path) for path in tmp_path.glob("?/*")} == set(first)
    assert len(first) == 2


@pytest.mark.parametrize("asking", [0, 1])
@pytest.mark.parametrize("face", FACES)
def test_a_checkpoint_that_one_rank_asks_for(face: str, asking: int, tmp_path: Path) -> None:
    """As where it was looked for before all ranks were there."""
    saved = tmp_path / "saved.ckpt"

    def save(rank: int, world_size: int) -> None:
        one = trainer(face, "ddp", tmp_path, max_epochs=2)
        one.fit(Classifier(), loader(16))
        one.save_checkpoint(saved)

    def work(rank: int, world_size: int) -> list[int]:
        steps: list[int] = []

        class Counts(Callback):
            def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
                steps.append(trainer.global_step)

        one = trainer(face, "ddp", tmp_path, Counts(), max_epochs=3)
        one.fit(Classifier(), loader(16), ckpt_path=str(saved) if rank == asking else None)
        return steps

    run_job(save, 2)
    batches = 1 if face == "lightning" else 2  # 16 samples, in batches of 8 for each worker or for both together
    whole = [*range(1, 3 * batches + 1)]
    first, second = run_job(work, 2)
    assert first == second == (whole[2 * batches :] if asking == 0 else whole)
