"""How many of a loader's batches are read."""

from __future__ import annotations

from drivetrain.errors import ConfigurationError


def limited(length: int | float, limit: int | float | None) -> int | float:
    if limit is None:
        return length
    if isinstance(limit, float):
        if length == float("inf"):
            return length if limit == 1.0 else 0 if limit == 0.0 else _no_fraction(limit)
        batches = int(length * limit)
        if batches == 0 and limit > 0 and length > 0:
            raise ConfigurationError(
                f"a limit of {limit} of the {int(length)} batches of a loader leaves none: give a number of batches, or"
                f" {1 / length:.3g} or more."
            )
        return batches
    return min(length, limit)


def _no_fraction(limit: float) -> int:
    raise ConfigurationError(
        f"a limit of {limit} (a fraction) needs a loader that has a length, this one is a stream: give a number of"
        " batches."
    )


def as_slice(length: int | float) -> int | None:
    return None if length == float("inf") else int(length)
