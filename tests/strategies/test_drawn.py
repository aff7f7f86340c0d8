"""A few runs that ``python -m tests.strategies.drawn`` draws: none of these is refused, and most go on elsewhere."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch.distributed.pipelining  # noqa: F401  # before the workers are forked

from tests.strategies import drawn_data
from tests.strategies.drawn import judged

with mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}):
    import deepspeed  # noqa: F401  # before the workers are forked: it takes seconds

SEEDS = (0, 4, 6, 8, 10, 14, 16, 19, 21, 22, 26, 28, 31, 32, 36, 37, 38)


@pytest.mark.parametrize("seed", SEEDS)
def test_as_on_one_process(seed: int) -> None:
    assert judged(3000 + seed) == "equal"


@pytest.mark.parametrize("seed", [1, 9, 13, 19, 23, 31, 33, 44, 52])
def test_over_data_that_is_read_in_less_usual_ways(seed: int, run_alone: Any) -> None:
    assert run_alone(drawn_data.judged, 30000 + seed, timeout=120) == "equal"  # torch's loaders keep a signal handler
