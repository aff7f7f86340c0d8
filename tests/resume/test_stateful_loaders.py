"""Loaders that say themselves where they stand, as torchdata's: a run goes on there, and reads nothing past."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch import nn

import drivetrain
import drivetrain.lightning
from drivetrain.errors import TrainingError
from tests.runs import QUIET

QUIETLY = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
OURS = [drivetrain, drivetrain.lightning]
_shuffles = itertools.count()


class Shuffled:
    """Batches in an order that only its state tells: every reading from the beginning has another."""

    batches = 7

    def __init__(self) -> None:
        self.order: list[int] = []
        self.loaded = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.loaded:
            generator = torch.Generator().manual_seed(next(_shuffles))
            self.order = torch.randperm(self.batches, generator=generator).tolist()
        self.loaded = False
        while self.order:
            yield torch.full((2, 1), float(self.order.pop(0)))

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.order)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.order, self.loaded = list(state_dict["left"]), True


class Sized(Shuffled):
    def __len__(self) -> int:
        return self.batches


class Opaque(Shuffled):
    def state_dict(self) -> dict[str, Any]:
        return {"left": iter(self.order)}


def trained(library: Any, data: Any, folder: Path, stops: bool = True, **options: Any) -> list[list[float]]:
    """The batches that were read: ``[epoch, number, value]``; saved after the fourth where it ``stops``."""
    base = drivetrain.TrainModule if library is drivetrain else library.LightningModule
    seen: list[list[float]] = []

    class Reads(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            seen.append([self.current_epoch, batch_idx, float(batch[0])])
            return self.net(batch).pow(2).mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if stops and self.current_epoch == 0 and batch_idx == 3:
                self.trainer.save_checkpoint(folder / "x.ckpt")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    goes_on = {} if stops else {"ckpt_path": folder / "x.ckpt"}
    given = QUIETLY if library is lightning.pytorch else QUIET
    trainer = library.Trainer(**{**given, "max_epochs": 1, "enable_checkpointing": False, **options})
    trainer.fit(Reads(), data, **goes_on)
    return seen


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("kind", [Shuffled, Sized])
@pytest.mark.parametrize("library", OURS)
def test_a_run_goes_on_where_its_loader_stood(library: Any, kind: Any, window: int, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": window}
    whole = trained(library, kind(), tmp_path, **options)
    rest = trained(library, kind(), tmp_path, stops=False, max_epochs=2, **options)
    assert sorted(value for _, _, value in whole) == list(range(7))
    assert rest[:3] == whole[4:]
    assert [number for _, number, _ in rest] == [4, 5, 6, *range(7)]
    assert sorted(value for _, _, value in rest[3:]) == list(range(7)), "the next epoch begins anew"


@pytest.mark.parametrize("library", OURS)
def test_it_goes_on_from_the_beginning_of_a_window(library: Any, tmp_path: Path) -> None:
    if library is drivetrain:
        with pytest.raises(TrainingError, match="would lose the gradients of a window"):
            trained(library, Sized(), tmp_path, accumulate_grad_batches=3)
        return
    whole = trained(library, Sized(), tmp_path, accumulate_grad_batches=3)
    assert trained(library, Sized(), tmp_path, stops=False, accumulate_grad_batches=3) == whole[3:]


@pytest.mark.parametrize(("first", "second"), itertools.permutations([lightning.pytorch, drivetrain.lightning]))
def test_it_lies_where_lightning_has_it(first: Any, second: Any, tmp_path: Path) -> None:
    whole = trained(first, Sized(), tmp_path)
    assert trained(second, Sized(), tmp_path, stops=False) == whole[4:]


@pytest.mark.parametrize("library", OURS)
def test_a_state_that_no_file_can_hold_is_told(library: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="the state of the training loader is not saved: .* reads past the batches"):
        trained(library, Opaque(), tmp_path)
    rest = trained(library, Opaque(), tmp_path, stops=False)
    assert [number for _, number, _ in rest] == [4, 5, 6]
