"""A run that goes on under a strategy that trains otherwise says so; between exact ones nothing is said."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from drivetrain import Trainer
from tests.runs import QUIET, Classifier, loader

SAID = "the checkpoint is of a run with strategy="


def run(strategy: Any, path: Path, ckpt_path: Path | None = None) -> list[str]:
    """Train an epoch more, and save; the warnings of another strategy."""
    epochs = 1 if ckpt_path is None else 2
    trainer = Trainer(**QUIET, strategy=strategy, devices=1, max_epochs=epochs)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(Classifier(), loader(), ckpt_path=ckpt_path)
    trainer.save_checkpoint(path)
    return [str(one.message) for one in told if SAID in str(one.message)]


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        ("local_sgd", "single", True),
        ("single", "local_sgd", True),
        ("local_sgd", "local_sgd", False),
        ("single", "ddp", False),
    ],
)
def test_it_is_told_where_one_of_them_is_not_exact(tmp_path: Path, then: str, now: str, told: bool) -> None:
    assert run(then, tmp_path / "then.ckpt") == []
    found = run(now, tmp_path / "now.ckpt", tmp_path / "then.ckpt")
    assert len(found) == told
    if told:
        assert f"strategy={then}, and strategy={now} does not train as that does: give strategy={then}" in found[0]
