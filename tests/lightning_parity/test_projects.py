"""Each project under Lightning and under drivetrain: the same figures, files and order, save what it declares."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import lightning.pytorch
import pytest

import drivetrain.lightning
from tests.lightning_parity import modules
from tests.lightning_parity.comparison import differences, unexpected
from tests.lightning_parity.laboratory import run

NAMES = sorted(found.name for found in pkgutil.iter_modules(modules.__path__))


@pytest.mark.parametrize("name", NAMES)
def test_same_figures(name: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"{modules.__name__}.{name}")
    theirs = run(module.project, lightning.pytorch, tmp_path / "there")
    ours = run(module.project, drivetrain.lightning, tmp_path / "here")
    lines = unexpected(differences(theirs, ours), getattr(module, "DIFFERENCES", {}))
    assert not lines, "\n" + "\n".join(lines)
