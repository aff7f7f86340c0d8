"""Hyper-parameters as loggers can hold them: plain data, or one flat level with ``/`` in the names."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf


def plain(value: Any) -> Any:
    """``value`` as dictionaries, lists, strings, numbers, booleans and None; anything else as its ``str``.

    So are keys: a table of names by number has numbers for its keys.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, DictConfig | ListConfig):
        return plain(OmegaConf.to_container(value, resolve=True))
    if isinstance(value, Namespace):
        return plain(vars(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        size = value.numel() if isinstance(value, torch.Tensor) else value.size
        return plain(value.item()) if size == 1 else str(value.tolist())
    if isinstance(value, type) or callable(value):
        return getattr(value, "__qualname__", str(value))
    return str(value)


def _key(key: Any) -> bool | int | float | str | None:
    name = plain(key)
    return name if name is None or isinstance(name, bool | int | float | str) else str(key)


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """One level: ``{"model": {"width": 8}}`` is ``{"model/width": 8}``; lists and None are their ``str``."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in plain(params).items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{name}/"))
        else:
            flat[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
