"""Projects drawn by a seed: the same under both libraries in whatever the grammar combines, save what is declared.

``python -m tests.lightning_parity.drawn FIRST COUNT`` looks at as many more and makes small what differs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lightning_parity.drawn.cases import CASES
from tests.lightning_parity.drawn.comparing import undeclared
from tests.lightning_parity.drawn.grammar import draw

SEEDS = range(48)


@pytest.mark.parametrize("name", CASES)
def test_same_as_before(name: str, tmp_path: Path) -> None:
    assert not undeclared(CASES[name], tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
def test_same_of_a_draw(seed: int, tmp_path: Path) -> None:
    lines = undeclared(draw(seed), tmp_path)
    assert not lines, "\n" + "\n".join(f"{name}: {line}" for name, line in lines.items())
