"""Checks on several ranks that share a GPU, each held to one process: the ranks run them one after another, and are
started anew after one in which a rank ended or nothing came."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drivetrain.errors import ConfigurationError, TrainingError
from tests.gpu import one_gpu
from tests.runs import Outcome

LIMIT = 60.0  # seconds that a check may take before its ranks are killed
Saved = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """What the ranks do, and how far what comes of it may be from what comes of one process.

    Attributes:
        run: what trains, with the Trainer's arguments that place the ranks (none: one process) and a folder for files.
        alike: checks with this in common have one run of one process.
        bound: of differences of losses and, in units of their size where that is above 1, of metrics; ``weights`` is
            that of weights.
        compared: of ``curve``, ``weights`` and ``metrics``.
        left_out: an ending of the names of weights that are not compared.
    """

    name: str
    run: Callable[..., Outcome]
    alike: Any
    bound: float
    weights: float
    compared: tuple[str, ...] = ("curve", "weights", "metrics")
    left_out: str = " "

    def saved(self, accelerator: str, folder: Path, **places: Any) -> Saved:
        try:
            outcome = self.run(folder, accelerator=accelerator, **places)
        except (ConfigurationError, TrainingError) as error:
            return {"refused": str(error)}
        used = outcome.trainer.strategy.device.type
        assert used == {"gpu": "cuda"}.get(accelerator, accelerator), f"it ran on {used}"
        weights = {name: value.cpu() for name, value in outcome.weights.items()}
        return {"weights": weights, **{name: getattr(outcome, name) for name in ("curve", "metrics", "steps")}}

    def judged(self, reference: Saved, found: Saved) -> tuple[bool, str]:
        """Whether it is as it should be, and what to say of it."""
        if "refused" in found:
            return "could not start" not in found["refused"], f"refused: {found['refused']}"
        if "refused" in reference:
            return False, f"one process refuses: {reference['refused']}"
        if reference["steps"] != found["steps"] or not found["steps"]:
            return False, f"{found['steps']} steps, not {reference['steps']}"
        if reference["metrics"].keys() != found["metrics"].keys():
            return False, f"metrics {sorted(found['metrics'])}, not {sorted(reference['metrics'])}"
        far = self._differences(reference, found)
        bounds = {"weights": self.weights}
        return all(value <= bounds.get(name, self.bound) for name, value in far.items()), str(far)

    def _differences(self, reference: Saved, found: Saved) -> dict[str, float]:
        metrics = reference["metrics"]
        far = {
            "curve": [abs(a[1] - b[1]) for a, b in zip(reference["curve"], found["curve"], strict=True)],
            "weights": [
                float((value.double() - found["weights"][name].double()).abs().max())
                for name, value in reference["weights"].items()
                if not name.endswith(self.left_out) and value.numel()
            ],
            "metrics": [abs(value - found["metrics"][name]) / max(1.0, abs(value)) for name, value in metrics.items()],
        }
        return {name: max(far[name], default=0.0) for name in self.compared}


Checks = Callable[[argparse.Namespace], Iterable[Check]]


def main(module: str, checks: Checks, parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Run ``checks(task)``, where ``python -m module`` comes here with the same arguments in each rank. Gives the exit
    code."""
    parser.add_argument("--accelerator", default="gpu", help="cpu to try the checks themselves")
    parser.add_argument("--as-rank", nargs=2, metavar=("FOLDER", "FIRST"), default=None, help=argparse.SUPPRESS)
    task = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # each would be there once a rank and check
    todo = [*checks(task)]
    if task.as_rank is not None:
        _as_rank(Path(task.as_rank[0]), todo[int(task.as_rank[1]) :], task)
        return 0
    failed, at, references = 0, 0, dict[Any, Saved]()
    while at < len(todo):
        with tempfile.TemporaryDirectory() as place:
            folder, started = Path(place), time.monotonic()
            command = [sys.executable, "-m", module, *argv, "--as-rank", place, str(at)]
            running = one_gpu.start(task.ranks, command)
            try:
                done, ended, refused = 0, None, False
                while ended is None and at + done < len(todo):
                    results = [folder / f"{done} of rank {rank}.pt" for rank in range(task.ranks)]
                    ends = [one_gpu.awaited(result, running, LIMIT) for result in results]
                    ended = next((end for end in ends if end is not None), None)
                    founds = [torch.load(result) for result in results if result.exists()]
                    refused = any("refused" in found for found in founds)
                    if ended is None or refused:
                        failed += not _told(todo[at + done], founds, references, task)
                        done += 1
            finally:
                for process in running:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(5.0 if ended is None else 0.0)
                    process.kill()
        at += done
        if ended is not None and done and refused:  # a rank alone may be refused amid a run, which the others wait for
            continue
        print(f"{at} of {len(todo)} came to an end, {done} of them in {time.monotonic() - started:.0f} s", flush=True)
        if at < len(todo):
            failed += 1
            print(f"{todo[at].name}: WRONG, {ended}", flush=True)
            at += 1
    print(f"{failed} of {len(todo)} checks on {task.ranks} ranks went wrong")
    return 1 if failed else 0


def _told(check: Check, founds: list[Saved], references: dict[Any, Saved], task: argparse.Namespace) -> bool:
    """Whether all ranks, each of which goes on in its script, have what is right; says that of the first, or what is
    not."""
    if check.alike not in references:
        with tempfile.TemporaryDirectory() as folder:
            references[check.alike] = check.saved(task.accelerator, Path(folder))
    judged = [check.judged(references[check.alike], found) for found in founds]
    rank = next((rank for rank, (right, _) in enumerate(judged) if not right), 0)
    right, said = judged[rank]
    print(f"{check.name}: {'right' if right else f'WRONG on rank {rank}'}, {said}", flush=True)
    return right


def _as_rank(folder: Path, todo: list[Check], task: argparse.Namespace) -> None:
    """As one of the ranks, told which by the environment."""
    for number, check in enumerate(todo):
        own = folder / f"files {number}"
        own.mkdir(exist_ok=True)
        found = check.saved(task.accelerator, own, num_nodes=task.ranks)
        result = folder / f"{number} of rank {os.environ['RANK']}.pt"
        torch.save(found, result.with_suffix(".partial"))
        result.with_suffix(".partial").rename(result)
