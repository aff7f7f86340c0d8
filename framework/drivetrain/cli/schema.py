"""Check a config group against a dataclass: unknown keys, wrong types and values out of range, each in one sentence."""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drivetrain.errors import ConfigurationError, nearest

T = TypeVar("T")


def option(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    among: tuple[Any, ...] | None = None,
    also: tuple[Any, ...] = (),
    fraction: bool = False,
) -> Any:
    """A dataclass field with a range. ``also``: values accepted besides the range, for example ``-1`` for no limit.
    ``fraction``: a whole number counts, and any other number is a part of one, so at most 1.0."""
    bounds = {
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "among": among,
        "also": also,
        "fraction": fraction,
    }
    return field(default=default, metadata=bounds)


def checked(schema: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """``schema`` filled with ``values``.

    Args:
        schema: a dataclass, its fields possibly made by :func:`option`.
        values: plain data; keys that are absent keep the schema's default.
        where: what the keys are written after on the command line, for example ``"trainer"``.

    Raises:
        ConfigurationError: an unknown key, a value of another type or out of range, or one that must be given.
    """
    known = {item.name: item for item in fields(schema)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(schema)
    config: DictConfig = OmegaConf.structured(schema)
    OmegaConf.set_readonly(config, False)  # a frozen dataclass makes a read-only config
    for key, value in values.items():
        full = f"{where}.{key}" if where else key
        if key not in known:
            raise ConfigurationError(f"there is no option {full!r}: {nearest(key, known)}")
        try:
            merged = OmegaConf.merge(config, {key: value})
        except OmegaConfBaseException as error:
            inner = getattr(error, "full_key", key) or key
            deeper = f" ({first_line(error)})" if inner != key else ""
            raise ConfigurationError(f"{full}={written(value)} must be {_type(hints[key])}{deeper}") from error
        assert isinstance(merged, DictConfig)
        config = merged
        _in_range(known[key], full, config[key])
    for key in known:
        if OmegaConf.is_missing(config, key):
            raise ConfigurationError(f"{where + '.' if where else ''}{key} must be given")
    result = OmegaConf.to_object(config)
    assert isinstance(result, schema)
    return result


_WRITTEN = (bool, int, float, str, type(None), list, dict)  # what a config's own values are


def _is_default(factory: Callable[..., Any], name: str, value: Any) -> bool:
    parameter = inspect.signature(factory).parameters.get(name)
    return parameter is not None and type(parameter.default) is type(value) and bool(parameter.default == value)


def check_numbers(factory: Callable[..., Any], arguments: Mapping[str, Any], where: str) -> None:
    """Raise :class:`ConfigurationError` for what is none where ``factory`` says that it takes numbers or switches only,
    and for a part of a number where it takes whole ones. An argument's own default is taken, whatever its hint says
    (``rate: float = None``), and so is what a ``_target_`` made."""
    try:
        hints = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except (NameError, AttributeError, TypeError, SyntaxError):  # made for a type checker only
        return
    for name, value in arguments.items():
        kinds = _alternatives(hints.get(name, Any))
        numbers = all(kind in (int, float, bool, type(None)) for kind in kinds)
        taken = (*kinds, int) if float in kinds else kinds
        refused = type(value) in _WRITTEN and type(value) not in taken
        if numbers and refused and not _is_default(factory, name, value):
            raise ConfigurationError(f"{where}.{name}={written(value)} must be {_type(hints[name])}")


def first_line(error: BaseException) -> str:
    """The part of an exception's message that is a sentence."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def written(value: Any) -> str:
    """``value`` as the user writes it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _in_range(item: Field[Any], full: str, value: Any) -> None:
    bounds = item.metadata
    if not bounds and isinstance(value, float) and not math.isfinite(value) and value != item.default:
        raise ConfigurationError(f"{full}={value} must be finite")
    if not bounds or value is None or (isinstance(value, str) and value == "???"):
        return
    accepted = bounds["also"]
    if any(value == one and type(value) is type(one) for one in accepted):
        return
    if bounds["among"] is not None:
        if value not in bounds["among"]:
            known = nearest(written(value), map(written, bounds["among"]))
            raise ConfigurationError(f"{full}={written(value)} is unknown: {known}")
        return
    if isinstance(value, bool):
        return
    if isinstance(value, str):
        if bounds["at_least"] is None and bounds["above"] is None and bounds["at_most"] is None:
            return
        raise ConfigurationError(f"{full}={value} must be {_range(bounds)}")
    low, above, high = bounds["at_least"], bounds["above"], bounds["at_most"]
    fits = (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high)
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigurationError(f"{full}={written(value)} must be {_range(bounds)}")
    if bounds["fraction"] and isinstance(value, float) and value > 1.0:
        raise ConfigurationError(f"{full}={value} is a fraction and at most 1.0: write a whole number for a count")


def _range(bounds: Mapping[str, Any]) -> str:
    parts = []
    for key, word in (("at_least", "at least"), ("above", "greater than"), ("at_most", "at most")):
        if bounds[key] is not None:
            parts.append(f"{word} {bounds[key]}")
    text = " and ".join(parts) or "finite"
    return " or ".join([text, *(written(value) for value in bounds["also"])])


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; any other annotation alone."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _type(annotation: Any) -> str:
    if len(parts := _alternatives(annotation)) > 1:
        return " or ".join(dict.fromkeys(map(_type, parts)))
    if annotation in _NAMES:
        return _NAMES[annotation]
    return f"of type {getattr(annotation, '__name__', annotation)}"
