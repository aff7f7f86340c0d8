"""Pipelines of 2 to 4 stages, held to the run on one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining  # before the workers are forked  # noqa: F401
from torch import nn

from drivetrain import Trainer, TrainModule
from drivetrain.declaration import Plan, conflicts
from drivetrain.errors import ConfigurationError
from drivetrain_plugins.strategies.declared.pipeline import PIPELINE, PipelineOptions
from drivetrain_plugins.strategies.pipeline_cut import balance
from drivetrain_plugins.strategies.pipeline_schedule import runs
from tests.runs import QUIET, Classifier, difference, loader, seeded, train
from tests.strategies.gpt import tiny_gpt, token_loader
from tests.strategies.parity import check_parity, run


# -- cutting ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("costs", "parts", "sizes"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([9, 1, 1, 1], 2, [1, 3]),
        ([1, 1, 1, 9], 3, [2, 1, 1]),
        ([0, 0, 0], 3, [1, 1, 1]),
        ([3, 0, 3, 0, 3], 3, [2, 2, 1]),
        ([5], 1, [1]),
    ],
)
def test_stages_are_of_about_equal_weight(costs: list[int], parts: int, sizes: list[int]) -> None:
    found = balance(costs, parts)
    assert [i for part in found for i in part] == list(range(len(costs)))
    assert sorted(map(len, found)) == sorted(sizes)
    largest = max(sum(costs[i] for i in part) for part in found)
    assert largest == max(
        sum(costs[a:b])
        for a, b in zip(*(lambda c: (c[:-1], c[1:]))([0, *(sum(sizes[: i + 1]) for i in range(parts))]), strict=True)
    )


@pytest.mark.parametrize("total", range(1, 18))
@pytest.mark.parametrize("microbatches", [1, 3, 4])
def test_every_sample_is_in_one_piece(total: int, microbatches: int) -> None:
    found = runs(total, microbatches)
    assert sum(pieces * size for pieces, size in found) == total
    assert sum(pieces for pieces, _ in found) <= microbatches


# -- parity -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("schedule", "devices"), [("gpipe", 2), ("1f1b", 3), ("interleaved_1f1b", 2), ("gpipe", 4)]
)
def test_a_gpt_is_trained_as_on_one_process(schedule: str, devices: int) -> None:
    check_parity({"name": "pipeline", "schedule": schedule}, devices)


@pytest.mark.parametrize(("schedule", "devices"), [("1f1b", 2), ("interleaved_1f1b", 3)])
def test_tied_weights_have_the_gradient_of_both_ends(schedule: str, devices: int) -> None:
    options = {"microbatches": 3} if devices == 3 else {}
    outcome = check_parity({"name": "pipeline", "schedule": schedule, **options}, devices, make=partial(tiny_gpt, True))
    assert torch.equal(outcome.weights["model.token.weight"], outcome.weights["model.head.weight"])
