"""Projects drawn by a seed: the same under both libraries in whatever the grammar combines, save what is declared.

``python -m tests.lightning_parity.drawn FIRST COUNT`` looks at as many more and makes small what differs; with
``--devices 2``, on two ranks, and with ``--resumed`` breaks them off and goes on.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lightning_parity.drawn.cases import CASES, ON_RANKS, RESUMED, RESUMED_ON_RANKS
from tests.lightning_parity.drawn.comparing import undeclared
from tests.lightning_parity.drawn.grammar import draw
from tests.lightning_parity.drawn.on_ranks import drawn_for_ranks, undeclared_on_ranks
from tests.lightning_parity.drawn.resumed import disturbed, disturbed_on_ranks, drawn_to_resume

SEEDS = range(48)
SEEDS_ON_RANKS = (20, 29, 100, 118, 136, 173)  # which differed before, for a declared reason or not
RESUMED_SEEDS = range(200, 208)


@pytest.mark.parametrize("name", CASES)
def test_same_as_before(name: str, tmp_path: Path) -> None:
    assert not undeclared(CASES[name], tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
def test_same_of_a_draw(seed: int, tmp_path: Path) -> None:
    _no(undeclared(draw(seed), tmp_path))


@pytest.mark.parametrize("name", ON_RANKS)
def test_same_as_before_on_ranks(name: str, tmp_path: Path) -> None:
    _no(undeclared_on_ranks(ON_RANKS[name], tmp_path))


@pytest.mark.parametrize("seed", SEEDS_ON_RANKS)
def test_same_of_a_draw_on_ranks(seed: int, tmp_path: Path) -> None:
    _no(undeclared_on_ranks(drawn_for_ranks(seed), tmp_path))


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_as_before(name: str, tmp_path: Path) -> None:
    _no(disturbed(RESUMED[name], tmp_path))


@pytest.mark.parametrize("seed", RESUMED_SEEDS)
def test_resumed_of_a_draw(seed: int, tmp_path: Path) -> None:
    _no(disturbed(drawn_to_resume(seed), tmp_path))


@pytest.mark.parametrize("name", RESUMED_ON_RANKS)
def test_resumed_as_before_on_ranks(name: str, tmp_path: Path) -> None:
    _no(disturbed_on_ranks(RESUMED_ON_RANKS[name], tmp_path))


@pytest.mark.parametrize("seed", [20, 24])
def test_resumed_of_a_draw_on_ranks(seed: int, tmp_path: Path) -> None:
    _no(disturbed_on_ranks(drawn_to_resume(seed), tmp_path))


def _no(lines: dict[str, str]) -> None:
    assert not lines, "\n" + "\n".join(f"{name}: {line}" for name, line in lines.items())
