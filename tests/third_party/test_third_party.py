"""A strategy from another package: in ``--help``, trains, equals ``single``; the framework is as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import LIMIT

PACKAGE = Path(__file__).parent / "package"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package is installed as a user would."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(folder), str(PACKAGE)], check=True, capture_output=True, text=True)
    return folder


def python(site: Path, repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(site), str(repository), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TMPDIR": str(site), "TORCHINDUCTOR_CACHE_DIR": str(site)}
    return subprocess.run(
        [sys.executable, *words],
        cwd=repository,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def test_it_is_in_the_help(site: Path, repository: Path) -> None:
    done = python(site, repository, "train.py", "--help")
    assert done.returncode == 0
    assert "by_hand" in done.stdout


@pytest.mark.parametrize("devices", [2, 3])
def test_it_passes_the_parity_test(site: Path, repository: Path, devices: int) -> None:
    program = f"""
from tests.strategies.parity import check_parity
if __name__ == "__main__":
    print(check_parity({{"name": "by_hand", "pieces": 3}}, {devices}).steps, "steps")
"""
    done = python(site, repository, "-c", program)
    assert (done.returncode, done.stdout) == (0, "30 steps\n"), done.stderr


def test_it_trains_from_the_command(site: Path, repository: Path, tmp_path: Path) -> None:
    words = ["strategy=by_hand", "strategy.pieces=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1"]
    done = python(
        site, repository, "train.py", *words, "trainer.max_epochs=1", "task=fit", f"hydra.run.dir={tmp_path}/run"
    )
    assert done.returncode == 0, done.stderr
    assert "strategy=by_hand, 2 workers: completed" in done.stdout


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("strategy.pieces=0", "strategy.pieces=0: give at least 1"),
        ("strategy.piece=2", "'pieces'"),
        ("devices=1", "strategy=by_hand needs at least 2 workers"),
    ],
)
def test_its_mistakes_are_named(site: Path, repository: Path, word: str, said: str) -> None:
    done = python(site, repository, "train.py", "strategy=by_hand", word)
    assert done.returncode == 2
    assert said in done.stderr
