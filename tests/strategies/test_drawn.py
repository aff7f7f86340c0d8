"""A few runs that ``python -m tests.strategies.drawn`` draws: none of these is refused, and most go on elsewhere."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch.distributed.pipelining  # noqa: F401  # before the workers are forked

from tests.strategies.drawn import judged

with mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}):
    import deepspeed  # noqa: F401  # before the workers are forked: it takes seconds

SEEDS = (0, 4, 6, 8, 10, 14, 16, 19, 21, 22, 26, 28, 31, 32, 36, 37, 38)


@pytest.mark.parametrize("seed", SEEDS)
def test_as_on_one_process(seed: int) -> None:
    assert judged(3000 + seed) == "equal"
