"""Sweeps by Hydra's plugins: launchers whose jobs run elsewhere, sweepers that look for the best of a number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain import app
from drivetrain.cli import objective
from drivetrain.errors import ConfigurationError
from tests.app.test_run import run_of, tiny
from tests.patience import LIMIT

__all__ = ["tiny"]

PLUGINS = Path(__file__).parent / "hydra_side"


def sweep(words: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own: Hydra looks for plugins once in a process."""
    words = [sys.executable, "-m", "drivetrain", "train", "-m", *words, "strategy=single", "hydra.sweep.dir=all", *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PLUGINS), *sys.path])}
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=LIMIT, check=False)


def test_jobs_of_other_processes_are_in_the_table(tiny: list[str]) -> None:
    done = sweep(tiny, "hydra/launcher=forked", "+model.width=3,4")  # the data has three features
    assert done.returncode == 1
    assert "job 1 failed: " in done.stderr and "job 0 failed" not in done.stderr
    completed, failed = (line for line in done.stdout.splitlines() if "model.width=" in line and "│" in line)
    assert "completed" in completed and f"{run_of('all/0')['metrics']['val/loss']:.6g}" in completed
    assert "failed" in failed
    assert "job 1 failed: " in done.stdout


@pytest.mark.parametrize("named", ["val/loss", "[val/loss]"])
def test_a_sweeper_is_told_the_metric_of_jobs_of_other_processes(tiny: list[str], named: str) -> None:
    words = ["hydra/launcher=forked", "hydra/sweeper=optuna", "optimizer.lr=0.1,0.001", f"objective={named}"]
    done = sweep(tiny, *words)
    assert done.returncode == 0, done.stderr
    losses = [run_of(f"all/{number}")["metrics"]["val/loss"] for number in (0, 1)]
    assert losses[0] != losses[1]
    assert json.loads(Path("all/lowest.json").read_text()) == {"of": losses, "is": min(losses)}


def test_a_sweeper_that_wants_a_metric_is_given_one(tiny: list[str]) -> None:
    done = sweep(tiny, "hydra/sweeper=optuna", "optimizer.lr=0.1,0.001")
    assert done.returncode == ConfigurationError.exit_code
    assert done.stderr.strip() == (
        "error: hydra/sweeper=optuna looks for the best of a number that each job returns: name the metric with"
        " objective=NAME, for example objective=val/loss"
    )
    assert not Path("all").exists()


def test_a_metric_that_was_not_logged_fails_the_job(tiny: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert app.run(["-m", *tiny, "strategy=single", "hydra.sweep.dir=all", "objective=val/los"]) == 1
    (told,) = (line for line in capfd.readouterr().err.splitlines() if "job 0 failed" in line)
    assert "job 0 failed: objective=val/los is no metric of this run: " in told and "val/loss" in told


def test_several_metrics_are_returned_in_order() -> None:
    record = {"metrics": {"a": 1.0, "b": 2.0}}
    assert objective.value(["b", "a"], record) == (2.0, 1.0)
    assert objective.value(None, record) is None


@pytest.mark.parametrize("wrong", [3, {"a": 1}, [1]])
def test_what_is_no_name_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigurationError, match="must be the name of a metric, or a list of names"):
        objective.names(wrong)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["objective=3"], "must be the name of a metric, or a list of names"),
        (["objective=val/loss", "task=predict"], "task=predict logs none"),
    ],
)
def test_what_no_job_could_return_is_refused_before_the_first(
    tiny: list[str], words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*tiny, "strategy=single", "seed=1,2", "hydra.sweep.dir=all", *words]
    assert app.run(["-m", *words]) == ConfigurationError.exit_code
    (told,) = capfd.readouterr().err.splitlines()
    assert told.startswith("error: objective=") and said in told
    assert not Path("all").exists()


def test_a_sweep_of_one_job_says_so(tiny: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert app.run(["-m", *tiny, "strategy=single", "hydra.sweep.dir=all"]) == 0
    assert "1 job\n" in "\n".join(line.strip() for line in capfd.readouterr().out.splitlines())


def test_a_mode_that_is_a_sweep_needs_no_m(tiny: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    words = [*tiny, "strategy=single", "hydra.sweep.dir=all", "seed=1,2"]
    assert app.run([*words, "hydra.mode=MULTIRUN"]) == 0
    assert [run_of(f"all/{number}")["seed"] for number in (0, 1)] == [1, 2]
    capfd.readouterr()
    assert app.run([*words, "hydra.mode=RUN"]) == ConfigurationError.exit_code
    assert capfd.readouterr().err.strip().startswith("error: seed=1,2 has several values: add -m")
