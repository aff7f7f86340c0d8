"""The table at the end: what the user wrote and logged, letter by letter."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from drivetrain.cli import table
from drivetrain.cli.table import Outcome


@pytest.mark.parametrize("sweep", [True, False])
def test_brackets_are_no_markup(sweep: bool, tmp_path: Path) -> None:
    metrics = {"val/loss[mean]": 0.25, "test/[/b]": 2}
    record: dict[str, Any] = {
        "status": "completed",
        "metrics": metrics,
        "world_size": 2,
        "strategy": "ring",
        "epochs": 1,
        "global_step": 3,
        "throughput": {"samples_per_second": 1.0},
        "seconds": {"total": 1.5},
    }
    written = ["callbacks=[early_stopping]", "+name=[/x]"]
    outcomes = [Outcome(written, tmp_path, record), Outcome(["seed=2"], tmp_path, record)]
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    table.show(outcomes if sweep else outcomes[:1], sweep, console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for words in (*metrics, "0.25", "completed", *(written if sweep else ())):
        assert words in shown
