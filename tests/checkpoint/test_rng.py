"""Random generators go on where they were."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from drivetrain.checkpoint import from_safe, rng, to_safe
from drivetrain.errors import CheckpointError


def draw() -> list[float]:
    return [*torch.randn(3).tolist(), *np.random.randn(3).tolist(), random.random(), random.gauss(0, 1)]


def test_bit_exact_through_a_file(tmp_path: Path) -> None:
    torch.randn(7)
    np.random.randn(1)  # leaves a cached second value behind
    random.gauss(0, 1)
    before = rng.capture()
    torch.save(to_safe(before), tmp_path / "rng.pt")
    expected = draw()
    draw()
    rng.restore(from_safe(torch.load(tmp_path / "rng.pt", weights_only=True)))
    assert draw() == expected
    rng.restore(before)


def test_capturing_draws_nothing_and_starts_no_cuda() -> None:
    state = rng.capture()
    first = draw()
    rng.restore(state)
    rng.capture()
    assert draw() == first
    assert torch.cuda.is_initialized() or state["cuda"] == []


def test_a_wrong_state_is_refused() -> None:
    state = rng.capture()
    with pytest.raises(CheckpointError, match="random generators"):
        rng.restore({**state, "python": (1, 2)})
    with pytest.raises(CheckpointError, match="KeyError"):
        rng.restore({"torch": state["torch"]})
