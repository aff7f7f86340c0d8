"""The ring benchmark runs as a command and reports what it measured."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.patience import LIMIT

COMMAND = [sys.executable, "-m", "drivetrain.bench", "ring"]


def test_rows_are_complete() -> None:
    arguments = ["--sizes", "0.1", "--ranks", "2", "--repeats", "1", "--json"]
    (row,) = json.loads(subprocess.run([*COMMAND, *arguments], check=True, capture_output=True, timeout=LIMIT).stdout)
    assert (row["ranks"], row["megabytes"]) == (2, 0.1)
    assert row["ratio"] == row["ring_ms"] / row["native_ms"] > 0
    assert row["ring_cpu_ms"] > 0 and row["native_cpu_ms"] > 0


def test_impossible_requests_are_refused() -> None:
    result = subprocess.run([*COMMAND, "--ranks", "1"], check=False, capture_output=True, text=True)
    assert result.returncode == 2 and "--ranks at least 2" in result.stderr
