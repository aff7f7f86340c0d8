"""A few runs of ``python -m tests.faults.torture``, each with another deed under another strategy."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.torture import judged
from tests.patience import SOON


@pytest.mark.parametrize("seed", [505, 506, 514])
def test_what_a_run_promises(seed: int, run_alone: Callable[..., list[str]]) -> None:
    def program() -> list[str]:
        with tempfile.TemporaryDirectory() as place:
            return judged(seed, Path(place), soon=SOON)

    assert run_alone(program) == ["kept"]
