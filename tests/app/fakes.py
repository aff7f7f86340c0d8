"""Plugins of a stranger's package, and workers that stand for training."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

from drivetrain.declaration import Declaration, Plan, Support
from drivetrain.launch.job import Job


@dataclass(frozen=True)
class Options:
    rate: float = 0.5
    rounds: int = 3


MINE = Declaration("mine", "a stranger's", "tests.app.fakes:Nothing", options=Options)
PICKY = Declaration(
    "picky",
    "refuses much",
    "tests.app.fakes:Nothing",
    support=Support(precisions=frozenset({"32-true"}), clipping=frozenset({"norm"}), min_world_size=2),
    check=lambda plan: [],
)


def only(plan: Plan) -> str:
    """What a test looks at."""
    return f"{plan.strategy} on {plan.world_size} x {plan.accelerator} over {plan.backend}"


def with_strangers(original: Callable[..., EntryPoints]) -> Callable[..., EntryPoints]:
    """``entry_points`` of an environment in which a stranger's package is installed too."""
    strangers = [
        EntryPoint("mine", "tests.app.fakes:MINE", "drivetrain.strategies"),
        EntryPoint("picky", "tests.app.fakes:PICKY", "drivetrain.strategies"),
        EntryPoint("shout", "tests.app.fakes:shout", "drivetrain.benchmarks"),
    ]

    def entry_points(**select: Any) -> EntryPoints:
        return EntryPoints([*original(**select), *EntryPoints(strangers).select(**select)])

    return entry_points


def shout(argv: list[str]) -> int:
    """A benchmark."""
    print("shout", *argv)
    return 3


def trains(job: Job, payload: dict[str, Any]) -> dict[str, Any]:
    """A worker whose loss is its seed; seed 13 fails, 14 stops itself by the signal that a user would send."""
    config = payload["config"]
    print(payload["run_folder"])
    if config["seed"] == 13 and job.rank == job.world_size - 1:
        raise ValueError("thirteen is unlucky")
    if config["seed"] == 14 and job.rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(20)
    return {
        "status": "completed",
        "global_step": 5,
        "metrics": {"val/loss": float(config["seed"])},
        "loss_curve": [[1, float(config["seed"])]],
        "folder": payload["run_folder"],
        "world_size": job.world_size,
    }
