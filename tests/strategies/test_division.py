"""What is looked at of a whole module, its summary and its graph, under strategies that divide it among the ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from drivetrain.support import declarations
from drivetrain_plugins.loggers.tensorboard import TensorBoardLogger
from tests.runs import Classifier, difference, loader, train

with mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}):
    import deepspeed  # noqa: F401  # before the workers are forked: it takes seconds

CASES: list[dict[str, Any]] = [
    {"name": "fsdp"},
    {"name": "zero", "stage": 3, "persistence_threshold": 0},
    {"name": "tensor_parallel"},
    {"name": "mesh", "shard": 2, "tensor": 2},
]


class Shown(Classifier):
    """Has an example of its input, as the summary's sizes and the graph need it."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"net.0": "columns", "net.2": "rows"}


def test_every_strategy_that_divides_is_looked_at() -> None:
    dividing = {name for name, declaration in declarations().items() if declaration.support.divides}
    assert dividing == {case["name"] for case in CASES}


@pytest.mark.parametrize("strategy", CASES, ids=lambda case: case["name"])
def test_a_summary_and_a_graph_are_of_the_whole_and_change_nothing(
    strategy: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    precision, bound = ("32-true", 1e-6) if strategy["name"] == "zero" else ("64-true", 1e-10)
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    devices = 4 if strategy["name"] == "mesh" else 2
    shown: dict[str, Any] = {"enable_model_summary": True, "logger": logger, "precision": precision}
    run = train(Shown, strategy, devices, data=loader(), max_epochs=1, **shown)
    said = capfd.readouterr().out
    assert "[3, 6]    [3, 4]" in said
    assert "452 parameters: 452 trainable, 0 not" in said
    events = EventAccumulator(str(next(tmp_path.rglob("events.out*")).parent))
    events.Reload()
    assert any("net" in node.name for node in events.Graph().node)
    assert max(difference(train(Shown, max_epochs=1, precision=precision), run).values()) < bound
