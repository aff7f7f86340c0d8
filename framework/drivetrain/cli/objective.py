"""The number that a job of a sweep gives to a sweeper which looks for the best one. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.errors import ConfigurationError, nearest

# Choices of the group hydra/sweeper that choose a job's values by what the jobs before it returned.
OPTIMIZERS = ("ax", "nevergrad", "optuna")


def names(objective: Any) -> list[str]:
    """The metrics that ``objective`` names: none, one, or those of a list.

    Raises:
        ConfigurationError: it is something else.
    """
    several = isinstance(objective, Sequence) and not isinstance(objective, str)  # a list of Hydra's is no list
    listed = [] if objective is None else list(objective) if several else [objective]
    if not all(isinstance(name, str) for name in listed):
        raise ConfigurationError(f"objective={objective} must be the name of a metric, or a list of names")
    return listed


def refuse_aimless(objective: Any, sweeper: str, task: Any) -> None:
    """Raise :class:`ConfigurationError` where ``sweeper`` wants a number of each job and would get none, or a job is
    asked for one that its ``task`` has not."""
    named = names(objective)
    if named and task == "predict":
        raise ConfigurationError(
            f"objective={objective} names a metric, and task=predict logs none: leave it, or take task=validate"
        )
    if sweeper in OPTIMIZERS and not named:
        raise ConfigurationError(
            f"hydra/sweeper={sweeper} looks for the best of a number that each job returns: name the metric with"
            " objective=NAME, for example objective=val/loss"
        )


def value(objective: Any, record: Mapping[str, Any]) -> float | tuple[float, ...] | None:
    """What the job with the run record ``record`` returns: the metric's last value, a tuple of them where several are
    named (a sweeper with one direction takes nothing but a number), None where none is.

    Raises:
        ConfigurationError: the run did not log it.
    """
    metrics, found = record.get("metrics", {}), []
    for name in names(objective):
        if name not in metrics:
            raise ConfigurationError(f"objective={name} is no metric of this run: {nearest(name, metrics)}")
        found.append(float(metrics[name]))
    return None if not found else found[0] if len(found) == 1 else tuple(found)
