"""Hyper-parameters as loggers can hold them: plain data, or one flat level with ``/`` in the names."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


def plain(value: Any) -> Any:
    """``value`` as dictionaries, lists, strings, numbers, booleans and None; anything else as its ``str``.

    So are keys: a table of names by number has numbers for its keys. Of a dataclass, what it holds beside its fields
    is there, too, as in the object that Lightning writes.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, DictConfig | ListConfig):
        return plain(_container(value))
    if isinstance(value, Namespace):
        return plain(vars(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        further = {name: item for name, item in getattr(value, "__dict__", {}).items() if name[:1] != "_"}
        return {name: plain(item) for name, item in (found | further).items()}
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        if isinstance(value, torch.Tensor) and value.is_meta:  # a shape without values
            return str(value)
        size = value.numel() if isinstance(value, torch.Tensor) else value.size
        return _number(value.item(), plain) if size == 1 else str(value.tolist())
    if isinstance(value, type) or callable(value):
        return getattr(value, "__qualname__", str(value))
    return str(value)


def _key(key: Any) -> bool | int | float | str | None:
    name = plain(key)
    return name if name is None or isinstance(name, bool | int | float | str) else str(key)


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """One level: ``{"model": {"width": 8}, "blocks": [{"size": 3}]}`` is ``{"model/width": 8, "blocks/0/size": 3}``.

    What else is no number, boolean or string is its text, by which runs are compared and found: Lightning's loggers
    write the same (a tuple with its brackets, a class with its module). A function is its name, without an address.
    """
    flat: dict[str, bool | int | float | str] = {}
    for key, given in _opened(params).items():
        name, value = f"{prefix}{key}", _opened(given)
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}/"))
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):
                flat.update(flatten(item, f"{name}/{number}/"))
        else:
            flat[name] = _text(value)
    return flat


def _opened(value: Any) -> Any:
    """A mapping of what holds one in another form; anything else as it is."""
    if isinstance(value, DictConfig):
        return {key: _entry(value, key) for key in value}
    if isinstance(value, Namespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value


def _number(item: Any, otherwise: Callable[[Any], Any]) -> Any:
    return str(item) if isinstance(item, np.generic) else otherwise(item)  # Python has no number that wide


def _container(value: DictConfig | ListConfig) -> Any:
    """Dictionaries and lists; with references as they are written where one of them refers to nothing here."""
    try:
        return OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException:
        return OmegaConf.to_container(value, resolve=False)


def _entry(value: DictConfig, key: Any) -> Any:
    if OmegaConf.is_missing(value, key):
        return "???"
    try:
        return value[key]
    except OmegaConfBaseException:
        written = OmegaConf.to_container(value, resolve=False)
        assert isinstance(written, dict)
        return written[key]


def _text(value: Any) -> bool | int | float | str:
    if type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta):
        text = _number(value.item(), _text)
        return text if isinstance(text, bool | int | float) else str(text)
    if isinstance(value, ListConfig):
        return str(_container(value))
    if callable(value) and not isinstance(value, type) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return str(value)
