"""Work for several workers, and the learning rate for them."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain import balance_workload, scale_lr
from drivetrain.errors import ConfigurationError
from tests.patience import LIMIT


def best(costs: list[int], workers: int) -> int:
    """The least possible largest sum, by trying everything."""
    return min(
        max(sum(cost for cost, who in zip(costs, given, strict=True) if who == worker) for worker in range(workers))
        for given in itertools.product(range(workers), repeat=len(costs))
    )


@settings(max_examples=80)
@given(costs=st.lists(st.integers(0, 50), max_size=7), workers=st.integers(1, 3))
def test_the_longest_first_is_within_its_bound_of_the_best(costs: list[int], workers: int) -> None:
    shares = balance_workload(costs, workers)
    assert sorted(item for share in shares for item in share) == list(range(len(costs)))
    assert len(shares) == workers and all(share == sorted(share) for share in shares)
    largest = max(sum(costs[item] for item in share) for share in shares)
    assert 3 * workers * largest <= (4 * workers - 1) * best(costs, workers)


def test_the_bound_is_reached_and_equals_go_to_the_first() -> None:
    # Graham's worst case for two workers: 7 where 6 is possible.
    assert balance_workload([3, 3, 2, 2, 2], 2) == [[0, 2, 4], [1, 3]]
    assert balance_workload([0, 0, 0, 0], 2) == [[0, 2], [1, 3]]
    assert balance_workload([], 2) == [[], []]


@pytest.mark.parametrize(("costs", "workers"), [([1], 0), ([1, -1], 2), ([math.nan], 1), ([math.inf], 1)])
def test_what_cannot_be_balanced_is_refused(costs: list[float], workers: int) -> None:
    with pytest.raises(ConfigurationError):
        balance_workload(costs, workers)


@pytest.mark.parametrize(
    ("costs", "workers"), [(["1"], 1), ([None], 1), ([10**400], 1), ([1], "2"), ([1], 2.0), ([1], True), ([True], 1)]
)
def test_what_is_no_number_is_one_sentence(costs: list[Any], workers: Any) -> None:
    with pytest.raises(ConfigurationError):
        balance_workload(costs, workers)


def test_costs_of_short_types_neither_wrap_nor_end() -> None:
    """Sums of float16 end at 65504, and what is subtracted from an unsigned nothing is the largest number."""
    given = np.array([60000, 50000, 40000, 30000, 20000, 10000, 5000, 4000, 3000, 2000, 1000], np.float16)
    assert balance_workload(given, 2) == balance_workload(given.tolist(), 2)  # type: ignore[arg-type]
    small = [0, 200, 100, 100, 50, 0, 7]
    for kind in (np.uint8, np.int16, np.float32):
        assert balance_workload(np.array(small, kind), 3) == balance_workload(small, 3)  # type: ignore[arg-type]
    assert balance_workload(torch.tensor(small), 3) == balance_workload(small, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lr", "workers", "rule"),
    [("0.1", 2, "linear"), (0.1, "2", "linear"), (0.1, 2.5, "linear"), (0.1, math.nan, "linear"),
     (1e308, 100, "linear"), (0.1, 2, None), (True, 2, "linear")],
)  # fmt: skip
def test_learning_rates_that_cannot_be_scaled_are_one_sentence(lr: Any, workers: Any, rule: Any) -> None:
    with pytest.raises(ConfigurationError):
        scale_lr(lr, workers, rule)


def test_learning_rates_are_scaled_by_rule() -> None:
    assert scale_lr(0.1, 8) == pytest.approx(0.8)
    assert scale_lr(0.1, 4, "sqrt") == pytest.approx(0.2)
    assert scale_lr(0.1, 1, "sqrt") == 0.1
    with pytest.raises(ConfigurationError, match="did you mean 'linear'"):
        scale_lr(0.1, 2, "lineal")  # type: ignore[arg-type]
    for lr, workers in ((0.0, 2), (math.nan, 2), (0.1, 0)):
        with pytest.raises(ConfigurationError):
            scale_lr(lr, workers)


def test_neither_needs_torch() -> None:
    code = (
        "import sys, drivetrain; drivetrain.balance_workload([1, 2], 2); drivetrain.scale_lr(1, 2);"
        "drivetrain.get_distributed_info(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)
