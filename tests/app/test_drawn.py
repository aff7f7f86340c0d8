"""A few command lines that ``python -m tests.app.drawn`` draws: of each kind one, and what once went wrong."""

from __future__ import annotations

from pathlib import Path

from tests.app.drawn import draw, judged, keep, prepare
from tests.distributed import run_alone

SEEDS = {
    4179: "equal",
    3010: "refused",
    2031: "refused",  # a name that is too long
    2171: "late",  # a text for a number of the checkpoint's
    3034: "refused",  # a checkpoint that is damaged or another's
    3018: "shown",
    3009: "swept",
}


def test_each_ends_as_it_should(tmp_path: Path) -> None:
    def outcomes() -> list[str]:
        prepare()
        (tmp_path / "kept").mkdir()
        kept = keep(tmp_path / "kept")
        return [judged(seed, kept) for seed in SEEDS]

    found = run_alone(outcomes)
    assert dict(zip(SEEDS, found, strict=True)) == SEEDS


def test_every_kind_is_drawn_and_a_quarter_is_broken() -> None:
    kinds = [draw(seed).kind for seed in range(400)]
    assert set(kinds) == {"plain", "broken", "shown", "swept", "resumed"}
    assert 70 < kinds.count("broken") < 130
