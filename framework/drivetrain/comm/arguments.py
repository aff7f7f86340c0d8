"""Arguments that cannot be meant, refused in one sentence before anything happens. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from drivetrain.errors import ConfigurationError, DrivetrainError, nearest

if TYPE_CHECKING:
    from drivetrain.comm.schedule import Schedule

OPS = ("sum", "average", "min", "max", "product")
_ELSEWHERE = {"mean": "average", "avg": "average", "prod": "product", "mul": "product", "add": "sum"}


def is_whole(value: object) -> bool:
    """Whether it is a whole number, Python's or numpy's; True and False are none."""
    return type(value) is int or (isinstance(value, int | np.integer) and not isinstance(value, bool))


def is_whole_list(values: object) -> bool:
    """Whether it is a sequence or array of whole numbers."""
    return isinstance(values, Sequence | np.ndarray) and not isinstance(values, str) and all(map(is_whole, values))


def number(value: object) -> int | float | None:
    """``value`` as Python's own number where it is a real one, of Python, numpy, or a tensor of one element; else None.
    Booleans are none."""
    kind = type(value).__module__.partition(".")[0]
    if kind in ("numpy", "torch") and getattr(value, "size", None) is not None:
        try:
            value = value.item()  # type: ignore[attr-defined]
        except (ValueError, RuntimeError):  # of several elements
            return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def require_whole(name: str, value: object, least: int = 1, whose: str = "") -> None:
    """Raise where argument ``name`` of ``whose`` is no int, or below ``least``.

    Raises:
        ConfigurationError: says so.
    """
    if type(value) is not int:
        kind = type(value).__name__
        raise ConfigurationError(f"{name}={value!r}{whose} is of type {kind}: pass an int of {least} or more.")
    if value < least:
        raise ConfigurationError(f"{name}={value}{whose} is too small: pass {least} or more.")


def require_workers(workers: object) -> None:
    """Raise where ``workers`` is no number of workers.

    Raises:
        ConfigurationError: says so.
    """
    if not is_whole(workers) or workers < 1:  # type: ignore[operator]
        raise ConfigurationError(f"workers={workers!r}: give the number of workers, at least 1.")


def require_whole_list(name: str, values: object, example: str) -> None:
    """Raise where argument ``name`` is no sequence of whole numbers.

    Raises:
        ConfigurationError: says so.
    """
    if not is_whole_list(values):
        raise ConfigurationError(f"{name}={values!r} are no whole numbers: pass them as a list, such as {example}.")


def require_name(what: str, value: object, known: Iterable[str]) -> None:
    """Raise where ``value`` is none of the ``known`` names of a ``what``.

    Raises:
        ConfigurationError: with the nearest name.
    """
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise ConfigurationError(f"there is no {what} {value!r}: {nearest(str(value), names)}")


def require_op(operation: str, op: object, error: type[DrivetrainError] = ConfigurationError) -> None:
    """Raise where ``op`` is no way for ``operation`` to make one value of two.

    Raises:
        DrivetrainError: of the type ``error``, with the nearest name, also from what other libraries call it.
    """
    if not isinstance(op, str) or op not in OPS:
        word = str(op).rpartition(".")[2].lower()  # a member of torch's ReduceOp ends in its name
        near = nearest(_ELSEWHERE.get(word, word), OPS)
        raise error(f"{operation} knows no op {op!r}: {near} (of {', '.join(OPS)}).")


def require_schedule(value: Any, user: str) -> Schedule:
    """``value``, which is a schedule.

    Raises:
        ConfigurationError: it is not; ``user`` is who wants one.
    """
    from drivetrain.comm.schedule import Schedule

    if isinstance(value, Schedule):
        return value
    name = value if isinstance(value, str) else getattr(value, "__name__", "ring")
    what = f"the function {name!r}" if callable(value) else repr(value)
    raise ConfigurationError(f"{user} takes a Schedule, not {what}: make one, such as schedules.make({name!r}, 8).")
