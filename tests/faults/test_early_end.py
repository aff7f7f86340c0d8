"""``on_train_batch_start`` that returns -1 must do so on all ranks; on one only it is told at once."""

from __future__ import annotations

import time
from typing import Any

import pytest

from drivetrain.errors import WorkerError
from tests.patience import SOON
from tests.runs import Classifier, difference, train


class Ends(Classifier):
    """Returns -1 at batch 3 of the first epoch on ``ranks``; the others are slow to come there."""

    def __init__(self, ranks: tuple[int, ...], slow: float = 0.0) -> None:
        super().__init__()
        self.ranks, self.slow = ranks, slow

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if self.current_epoch == 0 and batch_idx == 3:
            if self.trainer.global_rank in self.ranks:
                return -1
            time.sleep(self.slow)
        return None


@pytest.mark.parametrize(("strategy", "devices", "rank"), [("ddp", 2, 1), ("ring", 3, 0)])
def test_one_rank_alone(strategy: str, devices: int, rank: int) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        train(lambda: Ends((rank,), slow=0.7), strategy, devices)
    assert time.monotonic() - began < SOON
    assert caught.value.rank == rank
    first = str(caught.value).splitlines()[0]
    assert f"on_train_batch_start returned -1 on rank {rank} at batch 3 of epoch 0 and rank" in first
    assert first.endswith("such as batch_idx or a logged metric.")


@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 2), ("ring", 3)])
def test_all_ranks_together(strategy: str, devices: int) -> None:
    alone = train(lambda: Ends((0,)))
    together = train(lambda: Ends(tuple(range(devices))), strategy, devices)
    assert alone.steps == 3 + 7
    assert max(difference(alone, together).values()) < 1e-10
