"""Train what the declarations allow, and hold it to ``single``'s figures: one combination, or many side by side."""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from drivetrain.declaration import Plan
from drivetrain.launch.temporary import temporary_folder
from drivetrain.support import AXES, Combination, declarations, plan_of

# Largest difference of the first losses from single's in the same combination. Sums in another order are all that
# changes, but fp16 and bf16 round what is summed to 3 and 2 digits.
TOLERANCE = {"64-true": 1e-10, "32-true": 1e-4, "bf16-mixed": 0.05, "16-mixed": 0.05, "bf16-true": 0.2}
LOOSE = 0.5  # where nothing exact is claimed (lossy gradients, federated rounds): about the same descent
STEPS = 3
PATIENCE = 180.0  # seconds that one combination may take
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


@dataclass(frozen=True)
class Outcome:
    """What came of a combination.

    Attributes:
        combination: its name.
        status: ``"trained"``, ``"not exact"`` or ``"failed"``.
        difference: largest difference of a loss from single's; None where there is none.
        bound: what it may be.
        error: what failed, in one line.
        seconds: that it took.
    """

    combination: str
    status: str
    difference: float | None = None
    bound: float | None = None
    error: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.status == "failed":
            return f"{self.combination}: failed: {self.error}"
        if self.status == "not exact":
            return f"{self.combination}: not exact: {self.difference:.1e} of {self.bound:.0e}"
        return f"{self.combination}: trained"


def arguments(plan: Plan) -> dict[str, Any]:
    """A plan as the Trainer's arguments."""
    return {
        **QUIET,
        "strategy": {"name": plan.strategy, **vars(plan.options)},
        "devices": plan.world_size,
        "precision": plan.precision,
        "compression": plan.compression,
        "gradient_clip_val": plan.clip_value,
        "gradient_clip_algorithm": plan.clip_algorithm,
        "accumulate_grad_batches": plan.accumulation,
        "compile": "eager" if plan.compile else False,
        "max_steps": STEPS,
        "num_sanity_val_steps": 0,
        "seed": 3,
    }


# -- one combination --------------------------------------------------------------------------------------------
def losses(combination: Combination) -> list[float]:
    """Of its first steps; of a module that steps by itself the mean over the epoch."""
    from drivetrain import Trainer
    from drivetrain.support_modules import MODULES, token_loader

    declaration = declarations()[combination.strategy]
    plan = plan_of(combination, declaration, declaration.support.exact_with)
    trainer = Trainer(**arguments(plan))
    trainer.fit(MODULES[combination.get("optimization")](plan.precision), token_loader(59, 8))
    if combination.get("optimization") in ("automatic", "closures"):
        if trainer.global_step != STEPS:
            raise RuntimeError(f"made {trainer.global_step} steps instead of {STEPS}")
        return [loss for _, loss in trainer.loss_curve]
    return [float(trainer.callback_metrics["loss_epoch"])]


@cache
def _alone(choices: tuple[str, ...]) -> list[float]:
    return losses(Combination("single", choices))


def alone(choices: tuple[str, ...]) -> list[float]:
    """The losses of ``single`` with the same choices, uncompressed and not compiled."""
    plain = {**dict(zip(AXES, choices, strict=True)), "compression": "none", "compile": "false"}
    return _alone(tuple(plain.values()))


def bound(combination: Combination) -> float:
    """How far its losses may be from single's."""
    support = declarations()[combination.strategy].support
    if combination.get("compression") != "none" or support.exact_with is None:
        return LOOSE
    return TOLERANCE[combination.get("precision")]


def outcome(combination: Combination) -> Outcome:
    """Train it and compare; what fails is told, not raised."""
    began = time.perf_counter()
    name, most = str(combination), bound(combination)
    try:
        found, expected = losses(combination), alone(combination.choices)
        pairs = list(zip(found, expected, strict=True))
    except Exception as error:  # whatever may go wrong in a run is the answer
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        return Outcome(name, "failed", bound=most, error=line, seconds=time.perf_counter() - began)
    worst = max(abs(a - b) for a, b in pairs)
    status = "trained" if math.isfinite(worst) and worst <= most else "not exact"
    return Outcome(name, status, worst, most, seconds=time.perf_counter() - began)


# -- many -------------------------------------------------------------------------------------------------------
def train(combinations: Sequence[Combination], jobs: int = 1) -> Iterator[Outcome]:
    """The outcome of each as it comes. They are trained in ``jobs`` processes, which are the parents of the workers;
    one that dies or takes too long is replaced, and its combination has failed."""
    waiting = list(reversed(combinations))
    running: dict[Any, _Process] = {}
    with temporary_folder("support") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    started = _Process(folder, waiting.pop())
                    running[started.answers] = started
                ready, _, _ = select.select(list(running), [], [], 1.0)
                for pipe in [*ready, *(pipe for pipe, one in running.items() if one.late and pipe not in ready)]:
                    found = running[pipe].result() if pipe in ready else running[pipe].too_late()
                    if running[pipe].over or not waiting:
                        running.pop(pipe).end()
                    else:
                        running[pipe].give(waiting.pop())
                    yield found
        finally:
            for one in running.values():
                one.end()


class _Process:
    """A fresh interpreter that trains one combination after the other: the one that shows progress must not compute,
    and what is forked must have one thread.

    Attributes:
        combination: what it is at.
        answers: where its outcomes can be read.
        over: whether nothing more can be expected of it.
    """

    def __init__(self, folder: Path, first: Combination) -> None:
        # Workers are forked where torch has one thread, which it reads from here when it is imported.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "TORCHINDUCTOR_CACHE_DIR": os.fspath(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "drivetrain.support_training"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
            start_new_session=True,  # Ctrl-C is this process's to handle
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.questions, self.answers = self.process.stdin, self.process.stdout
        self.over = False
        self.give(first)

    @property
    def late(self) -> bool:
        return time.monotonic() - self.began > PATIENCE

    def give(self, combination: Combination) -> None:
        self.combination, self.began = combination, time.monotonic()
        with suppress(BrokenPipeError):  # it is gone: that is read where its answer should be
            self.questions.write(json.dumps([combination.strategy, combination.choices]) + "\n")
            self.questions.flush()

    def result(self) -> Outcome:
        line = self.answers.readline()
        if line:
            return Outcome(**json.loads(line))
        self.over = True
        how = f"its process ended with exit code {self.process.wait()}"
        return Outcome(str(self.combination), "failed", bound=bound(self.combination), error=how)

    def too_late(self) -> Outcome:
        self.over = True
        how = f"took more than {PATIENCE:.0f} s"
        return Outcome(str(self.combination), "failed", bound=bound(self.combination), error=how)

    def end(self) -> None:
        self.process.kill()  # its workers end with it
        self.process.wait()
        self.answers.close()
        with suppress(BrokenPipeError):  # what was not taken
            self.questions.close()


def _serve() -> None:
    """Train what comes on stdin, a JSON list a line; outcomes go to stdout, where nothing else may go."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        strategy, choices = json.loads(line)
        answers.write(json.dumps(asdict(outcome(Combination(strategy, tuple(choices))))) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
