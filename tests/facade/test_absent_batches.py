"""Loaders that give None where a batch could not be made, as collate functions that leave out broken samples do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import drivetrain.lightning as ours
from tests.facade.recorder import QUIET, first_difference, loader, module, pair

GIVEN = list(loader(38))  # ten batches, the last of two samples


class Given:
    """A loader of what it is made of; a list would be several loaders to Lightning."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def project(*absent: int, **parts: Any) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("seen", float(batch_idx))

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    batches = Given(*(None if number in absent else batch for number, batch in enumerate(GIVEN)))
    base = {f.__name__: f for f in (training_step, validation_step, configure_optimizers)}

    def made(L: Any) -> Any:
        fit = {"train_dataloaders": batches, "val_dataloaders": Given(None, GIVEN[0])}
        return {"module": type(module(L, **{**base, **parts})), "fit": fit}

    return made


def by_hand(self: Any, batch: Any, batch_idx: int) -> None:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
    optimizer.step()


@pytest.mark.parametrize(
    ("absent", "parts", "options"),
    [
        ((1, 4, 5), {}, {}),
        ((0, 9), {}, {"val_check_interval": 3, "log_every_n_steps": 1}),
        ((2, 3, 6, 7), {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}),
        (tuple(range(10)), {}, {}),
        ((0, 3, 4), {"training_step": by_hand, "automatic_optimization": False}, {"gradient_clip_val": None}),
    ],
    ids=["some", "first and last", "windows", "all", "by hand"],
)
def test_they_are_passed_over(absent: Any, parts: Any, options: Any) -> None:
    (there, their_trainer, _), (here, trainer, _) = pair(project(*absent, **parts), **options)
    assert first_difference(there, here) == ""
    assert trainer.global_step == their_trainer.global_step


def test_it_is_said() -> None:
    with pytest.warns(UserWarning, match="gave None for a batch: such batches are passed over"):
        ours.Trainer(**QUIET, logger=False, max_epochs=1).fit(project()(ours)["module"](), Given(GIVEN[0], None))
