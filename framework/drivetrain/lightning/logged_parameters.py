"""Hyper-parameters and metrics on their way to a logger, for projects that write loggers of their own.

Lightning calls these private; loggers outside of it use them all the same.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor


def _convert_params(params: Mapping[str, Any] | Namespace | None) -> dict[str, Any]:
    """A Namespace as a dictionary, and nothing as an empty one."""
    if params is None:
        return {}
    return vars(params) if isinstance(params, Namespace) else params  # type: ignore[return-value]


def _sanitize_callable_params(params: dict[str, Any]) -> dict[str, Any]:
    """Names of classes, and of functions what they give: their own names where that is a function or an error."""
    return {name: _called(value) for name, value in params.items()}


def _called(value: Any) -> Any:
    if isinstance(value, type):
        return value.__name__
    if not callable(value):
        return value
    try:
        found = value()
    except Exception:  # whatever a stranger's function raises
        return getattr(value, "__name__", None)
    return value.__name__ if callable(found) else found


def _flatten_dict(params: Mapping[Any, Any], delimiter: str = "/", parent_key: str = "") -> dict[str, Any]:
    """One level: ``{"a": {"b": 1}, "c": [{"d": 2}]}`` is ``{"a/b": 1, "c/0/d": 2}``."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        name = f"{parent_key}{delimiter}{key}" if parent_key else str(key)
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        elif isinstance(value, Namespace):
            value = vars(value)
        if isinstance(value, Mapping):
            flat |= _flatten_dict(value, delimiter, name)
        elif isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):
                flat |= _flatten_dict(item, delimiter, f"{name}/{number}")
        else:
            flat[name] = value
    return flat


def _sanitize_params(params: dict[str, Any]) -> dict[str, Any]:
    """Change ``params``: numbers of numpy to Python's, and what is no number, text, truth value or tensor to text."""
    for name, value in params.items():
        plain = value.item() if isinstance(value, np.bool_ | np.integer | np.floating) else value
        params[name] = plain if type(plain) in (bool, int, float, str, Tensor) else str(plain)
    return params


def _convert_json_serializable(params: dict[str, Any]) -> dict[str, Any]:
    """What JSON cannot hold as text; the inside of lists and dictionaries is not looked at."""
    return {name: value if _is_json_serializable(value) else str(value) for name, value in params.items()}


def _is_json_serializable(value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float | str | list | dict):
        return True
    try:
        json.dumps(value)
    except (TypeError, OverflowError):
        return False
    return True


def _add_prefix(metrics: Mapping[str, Any], prefix: str, separator: str) -> Mapping[str, Any]:
    """``metrics`` with ``prefix`` before each name; themselves without one."""
    return {f"{prefix}{separator}{name}": value for name, value in metrics.items()} if prefix else metrics
