"""Reading a monitored metric: the current value, or one sentence that says why there is none."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from drivetrain.errors import ConfigurationError, MetricError, nearest

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

MODES = ("min", "max")


def check_mode(owner: str, mode: str) -> None:
    """Raise :class:`ConfigurationError` for a mode that is neither ``"min"`` nor ``"max"``."""
    if mode not in MODES:
        raise ConfigurationError(f"{owner}(mode={mode!r}) is not a mode: use 'min' or 'max'.")


def has_validation(trainer: Trainer) -> bool:
    """Whether this fit validates at all; so it does as long as its loaders were not asked for."""
    counts = trainer.num_val_batches
    return any(count > 0 for count in counts) if counts else trainer.has_validation


def missing(owner: str, monitor: str, known: Iterable[str], step: int | None = None) -> MetricError:
    """The error for a ``monitor`` that was never logged, where the metrics ``known`` are, by ``step``."""
    known = sorted(known)
    by = "" if step is None else f" by step {step}"
    hint = nearest(monitor, known)
    if known and not hint.startswith("known:"):
        hint = f"{hint} (known: {', '.join(known)})"
    return MetricError(
        f"{owner}(monitor={monitor!r}): no metric of that name was logged{by}; {hint};"
        f" log it with self.log({monitor!r}, ...) or change monitor."
    )


def worst(mode: str) -> float:
    """The value that every other one improves on."""
    return math.inf if mode == "min" else -math.inf


def improves(mode: str, current: float, best: float, min_delta: float = 0.0) -> bool:
    """Whether ``current`` is better than ``best`` by more than ``min_delta`` (>= 0). NaN improves on nothing."""
    return current < best - min_delta if mode == "min" else current > best + min_delta
