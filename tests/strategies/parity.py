"""One run that every strategy is held to: 30 optimizer steps of the tiny GPT with all that changes an update."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from drivetrain import Declaration
from drivetrain.module import TrainModule
from tests.runs import Outcome, difference, train
from tests.strategies.gpt import tiny_gpt, token_loader

# 59 samples in batches of 8, two batches a step: 4 steps an epoch, the last of 11 samples in batches of 8 and 3.
STEPS = 30
OPTIONS: dict[str, Any] = {
    "max_epochs": 8,
    "max_steps": STEPS,
    "check_val_every_n_epoch": 2,
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.5,
    "gradient_clip_algorithm": "norm",
}


def run(
    strategy: str | dict[str, Any] | Declaration = "single",
    devices: int = 1,
    make: Callable[[], TrainModule] = tiny_gpt,
    precision: str = "64-true",
    **options: Any,
) -> Outcome:
    """The tiny GPT trained under ``strategy``: warm-up, weight decay, accumulation, clipping, an uneven tail."""
    settings = {**OPTIONS, **options}
    data, validation = token_loader(), token_loader(23, 5, shuffle=False)
    return train(make, strategy, devices, data=data, validation=validation, precision=precision, **settings)


@cache
def reference(make: Callable[[], TrainModule] = tiny_gpt, precision: str = "64-true", **options: Any) -> Outcome:
    """``single``'s run; made once."""
    outcome = run("single", 1, make, precision, **options)
    assert outcome.steps == STEPS or options
    return outcome


def check_parity(
    strategy: str | dict[str, Any] | Declaration,
    devices: int,
    tolerance: float = 1e-10,
    make: Callable[[], TrainModule] = tiny_gpt,
    precision: str = "64-true",
    **options: Any,
) -> Outcome:
    """Train under ``strategy`` and hold losses, weights and metrics to ``single``'s within ``tolerance``."""
    outcome = run(strategy, devices, make, precision, **options)
    expected = reference(make, precision, **options)
    found = difference(expected, outcome)
    if precision != "64-true":
        # Adam makes steps of full size out of the rounding in a gradient that is zero (that of the keys' bias, which
        # softmax does not see), so these differ however they were trained. Where gradients are small it
        # magnifies rounding too: weights are held to a hundred times the tolerance of the losses. Metrics of any size
        # are compared relatively.
        names = [name for name in expected.weights if not name.endswith("key.bias")]
        found["weights"] = max(float((expected.weights[n] - outcome.weights[n]).abs().max()) for n in names) / 100
        pairs = [(outcome.metrics[name], value) for name, value in expected.metrics.items()]
        found["metrics"] = max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
    assert max(found.values()) <= tolerance, (strategy, devices, found)
    return outcome
