"""The Makefile's set-up: done once, redone when it must be, and made anew when it was cut short.

A stand-in for Python writes down what it is asked to do; nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.__main__ import PARTS, parts
from tests.patience import LIMIT

ROOT = Path(__file__).parents[2]

# As `PYTHON -m venv FOLDER` it makes FOLDER/bin/python, a copy of itself; everything else it only notes.
STAND_IN = """#!/bin/sh
echo "$*" >> "$NOTES"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg" ;;
  "-m pip install "*) exit "${PIP_ENDS_WITH:-0}" ;;
esac
"""


class Clone:
    """A checkout with the Makefile in it, in a folder with a space in its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "my clone"
        self.folder.mkdir()
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.folder)
        self.notes = folder / "notes"
        self.python = folder / "the python"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def make(self, *words: str, succeeds: bool = True, **environment: str) -> tuple[str, list[str]]:
        """Run make; what it printed and what Python was asked for, without the version check."""
        self.notes.write_text("")
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "ARGS", "VENV", "PYTHON"))
        }
        done = subprocess.run(
            ["make", "--no-print-directory", f"PYTHON={self.python}", *words],
            cwd=self.folder,
            env={**inherited, "NOTES": str(self.notes), **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert (done.returncode == 0) == succeeds, done.stdout + done.stderr
        asked = [line for line in self.notes.read_text().splitlines() if not line.startswith("-c ")]
        return done.stdout, asked


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


TRAIN_INSTALL = "-m pip install --quiet --quiet -e .[zero,recipes]"
TEST_INSTALL = "-m pip install --quiet --quiet -e .[zero,recipes,bench,cli,test]"


def test_train_sets_up_once_and_passes_the_arguments(clone: Clone) -> None:
    printed, asked = clone.make("train", "ARGS=devices=3 seed=2")
    assert asked == ["-m venv .venv", TRAIN_INSTALL, "train.py strategy=ring devices=3 seed=2"]
    assert [line.split()[0] for line in printed.splitlines()] == ["Making", "Installing", "Training:"]
    assert clone.make("train")[1] == ["train.py strategy=ring"]


def test_another_strategy_replaces_the_ring(clone: Clone) -> None:
    assert clone.make("train", "ARGS=strategy=ddp seed=2")[1][-1] == "train.py strategy=ddp seed=2"


def test_test_adds_its_own_packages_and_serves_training_too(clone: Clone) -> None:
    clone.make("train")
    assert clone.make("test", "ARGS=-k ring")[1] == [TEST_INSTALL, "-m pytest -k ring"]
    assert clone.make("test")[1] == ["-m tests"]
    assert clone.make("train")[1] == ["train.py strategy=ring"]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed_into_the_same_environment(clone: Clone, name: str) -> None:
    clone.make("test")
    later = time.time() + 5
    os.utime(clone.folder / name, (later, later))
    assert clone.make("test")[1] == [TEST_INSTALL, "-m tests"]


def test_an_install_cut_short_is_redone_from_nothing(clone: Clone) -> None:
    assert clone.make("train", succeeds=False, PIP_ENDS_WITH="1")[1] == ["-m venv .venv", TRAIN_INSTALL]
    left_over = clone.folder / ".venv" / "half-written"
    left_over.touch()
    assert clone.make("train")[1] == ["-m venv .venv", TRAIN_INSTALL, "train.py strategy=ring"]
    assert not left_over.exists()


def test_an_environment_made_by_hand_is_kept(clone: Clone) -> None:
    subprocess.run([clone.python, "-m", "venv", clone.folder / ".venv"], env={"NOTES": "/dev/null"}, check=True)
    mine = clone.folder / ".venv" / "mine"
    mine.touch()
    assert clone.make("train")[1] == [TRAIN_INSTALL, "train.py strategy=ring"]
    assert mine.exists()


def test_a_python_that_is_missing_is_named(clone: Clone) -> None:
    clone.python.write_text("#!/bin/sh\nexit 1\n")
    done = subprocess.run(
        ["make", "train", f"PYTHON={clone.python}"], cwd=clone.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "Python 3.11 or newer is needed" in done.stderr
    assert not (clone.folder / ".venv").exists()


def test_help_is_what_make_says_by_default(clone: Clone) -> None:
    printed, asked = clone.make()
    assert asked == []
    for target in ("train", "test", "lint", "types", "format", "clean"):
        assert f"make {target}" in printed


def test_the_parts_of_the_suite_are_the_whole() -> None:
    *named, rest = parts()
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))}
    names = [Path(path).name for part in named for path in part]
    assert [[Path(path).name for path in part] for part in named] == PARTS
    assert len(names) == len(set(names)) and set(names) <= folders
    assert rest == [str(ROOT / "tests"), *(f"--ignore={path}" for part in named for path in part)]
