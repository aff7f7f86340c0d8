"""What every registered strategy is held to, by being registered: parity, resuming, portable checkpoints, failures."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Trainer, TrainModule
from drivetrain.errors import WorkerError
from drivetrain.seeding import seed_everything
from drivetrain.support import declarations
from drivetrain_plugins.callbacks.model_checkpoint import ModelCheckpoint
from recipes.mnist.module import MnistClassifier
from tests.patience import SOON
from tests.resume.runs import assert_same
from tests.runs import QUIET, Outcome, difference, seeded, train
from tests.strategies.cells import Cell, cells, one_each, presets
from tests.strategies.gpt import TinyGPT, three_heads, tiny_gpt, token_loader
from tests.strategies.parity import check_parity


# -- (a) the same run -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cell", [cell for cell in cells() + presets() if cell.exact], ids=str)
def test_parity(cell: Cell) -> None:
    make = three_heads if cell.devices == 3 else tiny_gpt
    check_parity(cell.strategy, cell.devices, cell.declaration.support.tolerance, make, cell.precision)


class Digits(MnistClassifier):
    """The recipe's net without its dropout, whose draws differ from rank to rank."""

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"classifier.0": "columns", "classifier.3": "rows"}


def digits() -> TrainModule:
    return seeded(lambda: Digits(dropout=0.0, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9)))


def images(count: int) -> DataLoader[Any]:
    """Random ones, in batches of 4."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.rand(count, 1, 28, 28, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(pixels, torch.randint(10, (count,), generator=generator)), batch_size=4)


@cache
def read_by_single(precision: str) -> Outcome:
    return train(digits, data=images(10), validation=images(6), max_epochs=1, precision=precision)


@pytest.mark.parametrize("cell", [cell for cell in one_each() if cell.exact and cell.devices > 1], ids=str)
def test_parity_of_the_net_that_reads_digits(cell: Cell) -> None:
    options: dict[str, Any] = {"validation": images(6), "max_epochs": 1, "precision": cell.precision}
    run = train(digits, cell.strategy, cell.devices, data=images(10), **options)
    assert max(difference(read_by_single(cell.precision), run).values()) < cell.declaration.support.tolerance


def test_every_strategy_says_what_it_keeps() -> None:
    for name, declaration in declarations().items():
        support = declaration.support
        assert support.fidelity, name
        assert (support.fidelity == "exact") == (support.exact_with == {}), name


# -- (d) stopped in mid-epoch and resumed -----------------------------------------------------------------------
class SaveAt(Callback):
    """Saves after optimizer step ``step``, and at the end."""

    saves_checkpoints = True

    def __init__(self, folder: Path, step: int = -1) -> None:
        self.folder, self.step = folder, step

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == self.step and trainer.between_steps and not (self.folder / "middle.ckpt").exists():
            trainer.save_checkpoint(self.folder / "middle.ckpt")

    def on_train_end(self, trainer: Trainer, *rest: Any) -> None:
        trainer.save_checkpoint(self.folder / "end.ckpt")


def fit(
    folder: Path, cell: Cell, save: int = -1, resume: Path | None = None, steps: int = 10, precision: str | None = None
) -> Trainer:
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": None},
        strategy=cell.strategy,
        devices=cell.devices,
        precision=precision or cell.precision,
        seed=5,
        max_epochs=100,
        max_steps=steps,
        num_sanity_val_steps=0,
        log_every_n_steps=3,
        accumulate_grad_batches=2 if cell.takes(accumulation=2) else 1,
        callbacks=[SaveAt(folder, save)],
        default_root_dir=folder,
    )
    seed_everything(11)
    trainer.fit(TinyGPT(), token_loader(59, 8), ckpt_path=resume)
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Cell], Path]:
    """The folder of a run of ten steps under a strategy, saved after six and at the end; made once."""

    made: dict[str, Path] = {}

    def folder(cell: Cell) -> Path:
        if str(cell) not in made:
            made[str(cell)] = tmp_path_factory.mktemp(cell.name)
            fit(made[str(cell)], cell, save=6)
        return made[str(cell)]

    return folder


@pytest.mark.parametrize("cell", one_each(), ids=str)
def test_resumed_in_mid_epoch(cell: Cell, saved: Callable[[Cell], Path], tmp_path: Path) -> None:
    whole = saved(cell)
    fit(tmp_path, cell, resume=whole / "middle.ckpt")
    assert_same(whole, tmp_path, cell.devices)


# -- (c) portable checkpoints -----------------------------------------------------------------------------------
def _pairs() -> list[tuple[Cell, Cell]]:
    """Every strategy's checkpoint goes to the next two of the list, on other numbers of workers where they can."""
    every = one_each()
    larger = {(cell.name, cell.variant): cell for cell in cells()}
    following = [[every[(i + k) % len(every)] for k in (1, 2)] for i in range(len(every))]
    return [
        (cell, larger[one.name, one.variant]) for cell, after in zip(every, following, strict=True) for one in after
    ]


@pytest.mark.parametrize(("before", "after"), _pairs(), ids=str)
def test_a_checkpoint_fits_every_strategy(
    before: Cell, after: Cell, saved: Callable[[Cell], Path], tmp_path: Path
) -> None:
    checkpoint = saved(before) / "middle.ckpt"
    single = Cell(declarations()["single"], 1)
    expected = fit(tmp_path / "single", single, resume=checkpoint, steps=8, precision=after.precision).loss_curve
    found = fit(tmp_path / "other", after, resume=checkpoint, steps=8).loss_curve
    # What comes next is a function of the weights alone; what comes then, of the optimizer's state too.
    count = 8 if after.exact and before.exact else 7
    if after.declaration.support.exact_with is None:
        count = 6  # its steps are not single's: its own tests look at the weights that it goes on from
    assert [step for step, _ in found] == [step for step, _ in expected]
    worst = max(abs(a - b) for (step, a), (_, b) in zip(found, expected, strict=True) if step <= count)
    assert worst <= after.declaration.support.tolerance


# -- validation, the best checkpoint, its test ------------------------------------------------------------------
@pytest.mark.parametrize("cell", one_each(), ids=str)
def test_the_best_checkpoint_is_tested(cell: Cell, tmp_path: Path) -> None:
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": None},
        strategy=cell.strategy,
        devices=cell.devices,
        precision=cell.precision,
        max_epochs=2,
        callbacks=[ModelCheckpoint(tmp_path, monitor="val/loss")],
        default_root_dir=tmp_path,
    )
    module, held_out = TinyGPT(), token_loader(23, 5, shuffle=False)
    trainer.fit(module, token_loader(27), held_out)
    best = float(trainer.checkpoint_callback.best_model_score)
    [metrics] = trainer.test(module, held_out, ckpt_path="best", verbose=False)
    assert abs(metrics["test/loss"] - best) <= max(1e-9, cell.declaration.support.tolerance)


# -- (e) a rank is killed ---------------------------------------------------------------------------------------
class Dies(TinyGPT):
    """Rank ``victim`` is killed while the others train."""

    def __init__(self, victim: int, folder: Path) -> None:
        super().__init__()
        self.victim, self.folder = victim, folder

    def setup(self, stage: str) -> None:
        if self.trainer.global_rank == self.victim:
            threading.Thread(target=self._die, daemon=True).start()

    def _die(self) -> None:
        while not (self.folder / "training").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        (self.folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 1:
            (self.folder / "training").touch()
        return super().training_step(batch, batch_idx)


def _victims() -> list[Any]:
    every = [(cell, rank) for cell in one_each() if cell.devices > 1 for rank in {0, cell.devices - 1}]
    return [pytest.param(cell, rank, id=f"{cell}-rank{rank}") for cell, rank in every]


@pytest.mark.parametrize(("cell", "victim"), _victims())
def test_a_rank_is_killed(cell: Cell, victim: int, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        Trainer(
            strategy=cell.strategy,
            devices=cell.devices,
            precision=cell.precision,
            max_epochs=10_000,
            num_sanity_val_steps=0,
            **QUIET,
        ).fit(Dies(victim, tmp_path), token_loader(59, 8))
    ended = time.time()
    assert caught.value.rank == victim
    assert str(caught.value).startswith(f"rank {victim} failed: killed by SIGKILL")
    assert ended - (tmp_path / "died").stat().st_mtime < SOON
