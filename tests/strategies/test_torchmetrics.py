"""torchmetrics metrics under every strategy: each sample counts once, whichever ranks see it, and nobody is waited for
that does not evaluate."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from typing import Any

import pytest
import torch
import torchmetrics

from drivetrain.comm.communicator import Communicator
from drivetrain.metric_states import Gathering
from tests.runs import Outcome, train
from tests.strategies.cells import Cell, one_each, presets
from tests.strategies.gpt import TinyGPT, token_loader


class Measured(TinyGPT):
    """Sums, an extreme and a list of what the samples gave, logged and asked for in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.seen, self.asked, self.anew = (torchmetrics.SumMetric() for _ in range(4))
        self.largest, self.listed = torchmetrics.MaxMetric(), torchmetrics.CatMetric()
        self.register_buffer("samples", torch.zeros((), dtype=torch.double))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.samples += len(batch[0])
        self.trained.update(len(batch[0]))
        self.log("trained", self.trained, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rows = batch[0].sum(1)
        self.seen.update(len(rows))
        super().validation_step(batch, batch_idx)
        self.asked.update(len(rows))
        self.largest.update(rows.double() / 7)
        self.listed.update(rows.double() / 7)
        self.anew.update(len(rows))
        self.log_dict({"seen": self.seen, "largest": self.largest, "anew": self.anew})

    def on_validation_epoch_end(self) -> None:
        copied = copy.deepcopy(self.asked)
        self.log_dict({"asked": copied.compute(), "listed": self.listed.compute().sum()})
        self.asked.reset()
        self.listed.reset()
        self.anew.reset()


NAMES = ("trained", "seen", "largest", "asked", "listed", "anew")


@cache
def read_by_single(precision: str) -> Outcome:
    return outcome("single", 1, precision)


def outcome(strategy: Any, devices: int, precision: str) -> Outcome:
    """Batches of 4, the last of one sample, which several ranks may see."""
    data, validation = token_loader(13, 4), token_loader(9, 4, shuffle=False)
    settings = {"max_epochs": 1, "precision": precision, "timeout": 30.0}
    return train(Measured, strategy, devices, data=data, validation=validation, **settings)


@pytest.mark.parametrize("cell", [cell for cell in one_each() + presets() if cell.name != "federated"], ids=str)
def test_each_sample_counts_once(cell: Cell) -> None:
    devices = 2 if cell.name == "hierarchical" else cell.devices
    found = outcome(cell.strategy, devices, cell.precision).metrics
    for name in NAMES:
        assert found[name] == pytest.approx(read_by_single(cell.precision).metrics[name], rel=1e-6), name
    assert found["trained"] == 13 and found["seen"] == found["asked"] == 9


def test_a_pipelines_look_at_shapes_changes_no_buffer() -> None:
    found = outcome("pipeline", 2, "64-true")
    assert found.weights["samples"] == read_by_single("64-true").weights["samples"] == 13


def test_a_way_of_the_projects_own_is_left() -> None:
    def mine(state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        return [state, state, state]

    class Own(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torchmetrics.SumMetric(dist_sync_fn=mine)

    data, validation = token_loader(13, 4), token_loader(8, 4, shuffle=False)
    found = train(Own, "ddp", 2, data=data, validation=validation, max_epochs=1).metrics
    assert found["seen"] == 12  # four on the first rank, by three
    assert found["asked"] == 8


def test_a_metric_leaves_the_run_without_its_communicator() -> None:
    metric = torchmetrics.SumMetric(dist_sync_fn=Gathering(Communicator(), True))
    assert copy.deepcopy(metric).dist_sync_fn is metric.dist_sync_fn
    assert pickle.loads(pickle.dumps(metric)).dist_sync_fn is None
