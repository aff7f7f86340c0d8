"""``LightningCLI`` under Lightning and under drivetrain: the same figures, files, configurations and messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lightning_parity.command_lines import on_two_ranks, scenarios
from tests.lightning_parity.command_lines.files import as_of_either, files_of
from tests.lightning_parity.comparison import differences
from tests.patience import LIMIT

LIBRARIES = ("lightning.pytorch", "drivetrain.lightning")
ROOT = Path(__file__).parents[2]


def both(folder: Path, *command: str) -> list[subprocess.CompletedProcess[str]]:
    """The same command over each library, in a folder of each, at the same time."""
    begun = []
    for library in LIBRARIES:
        place = folder / library
        place.mkdir(parents=True)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        changed = {"COMMAND_LINE_LIBRARY": library, "PYTHONPATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        begun.append(
            subprocess.Popen(
                [sys.executable, *command],
                cwd=place,
                env={**os.environ, **changed},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = []
    for process in begun:
        with process:
            try:
                out, err = process.communicate(timeout=LIMIT)
            finally:
                process.kill()
        ended.append(subprocess.CompletedProcess(command, process.returncode, out, err))
    return ended


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each library left of each scenario: all of them in one process, for the imports take longer."""
    folder = tmp_path_factory.mktemp("command_lines")
    for ended in both(folder, "-m", "tests.lightning_parity.command_lines", "."):
        assert ended.returncode == 0, ended.stderr
    return [json.loads((folder / library / "facts.json").read_text()) for library in LIBRARIES]


@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_same_command_line(name: str, seen: list[dict[str, Any]]) -> None:
    theirs, ours = (facts[name] for facts in seen)
    assert not isinstance(theirs["found"], str), theirs["found"]  # its traceback
    assert not isinstance(ours["found"], str), ours["found"]
    assert theirs["files"] or theirs["found"] or theirs["out"]
    lines = {**differences(theirs.pop("files"), ours.pop("files")), **differences(theirs, ours)}
    assert not lines, "\n" + "\n".join(f"{fact}: {line}" for fact, line in lines.items())


def test_same_command_line_on_two_ranks(tmp_path: Path) -> None:
    """The configuration is written once, the module of each rank is the same, and the figures are."""
    text = scenarios.CONFIG.replace("PACKAGE", "lightning.pytorch")
    (tmp_path / "in.yaml").write_text(text)
    options = ["--trainer.strategy=ddp", "--trainer.devices=2", "--data.count=24"]
    ended = both(tmp_path, str(on_two_ranks.__file__), "fit", "--config", str(tmp_path / "in.yaml"), *options)
    assert [each.returncode for each in ended] == [0, 0], [each.stderr[-3000:] for each in ended]
    theirs, ours = (
        json.loads(as_of_either(json.dumps(files_of(tmp_path / library), default=str))) for library in LIBRARIES
    )
    assert any(name.endswith("config.yaml") for name in theirs)
    lines = differences(theirs, ours)
    assert not lines, "\n" + "\n".join(f"{fact}: {line}" for fact, line in lines.items())
