"""What a step keeps on its module in plain Python: a list of outputs, a count, an average meter."""

from __future__ import annotations

import copy
import sys
from collections import deque
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.module import TrainModule

_NOT_THE_PROJECTS = ("torch", "torchmetrics", "drivetrain", "drivetrain_plugins", "lightning")
_DEPTH = 2  # of containers within one: a list of outputs for each of several loaders, by name
_MOST = 64  # of them: what has more holds single values


class KeptOnModule:
    """The plain attributes of ``module``, and of the project's own objects that are attributes of it, as they are now.

    Containers are copied with those in them, tensors and arrays by value; submodules, parameters and buffers are none
    of them.
    """

    def __init__(self, module: TrainModule) -> None:
        self._module = module
        self._then = {owner_id: (owner, _copied(owner)) for owner_id, owner in _owners(module).items()}

    def changed(self) -> list[str]:
        """Names of the attributes that are something else now."""
        found = []
        for owner, then in self._then.values():
            now = vars(owner)
            for name in _plain(owner):
                if name not in then or not _same(now[name], *then[name]):
                    found.append(name)
        return found

    def restore(self) -> None:
        """Make them again what they were; containers and tensors stay the objects that they are."""
        for owner, then in self._then.values():
            for name in [name for name in _plain(owner) if name not in then]:
                delattr(owner, name)
            for name, (value, content) in then.items():
                if content is not None and not _same(value, value, content):
                    _refill(value, content)
                vars(owner)[name] = value


def _owners(module: TrainModule) -> dict[int, Any]:
    found: dict[int, Any] = {id(module): module}
    for name in _plain(module):
        value = vars(module)[name]
        ours = type(value).__module__.partition(".")[0] in _NOT_THE_PROJECTS
        if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value) and not ours:
            found[id(value)] = value
    return found


def _plain(owner: Any) -> list[str]:
    if not isinstance(owner, nn.Module):
        return list(vars(owner))
    return [name for name in vars(owner) if name not in _of_any_module()]


@cache
def _of_any_module() -> frozenset[str]:
    return frozenset(vars(TrainModule()))


def _copied(owner: Any) -> dict[str, tuple[Any, Any]]:
    """Each plain attribute with a copy of what is in it, None where it cannot change in place."""
    return {name: (vars(owner)[name], _content(vars(owner)[name])) for name in _plain(owner)}


def _content(value: Any, depth: int = _DEPTH) -> Any:
    """A copy of what is in ``value``: of a container with those of the containers, tensors and arrays in it."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if _is_array(value):
        return value.copy()
    if not isinstance(value, list | dict | set | deque):
        return None
    inner = []
    if depth and len(value) <= _MOST and not isinstance(value, set):
        ahead = [(one, _content(one, depth - 1)) for one in (value.values() if isinstance(value, dict) else value)]
        inner = [(one, content) for one, content in ahead if content is not None]
    return copy.copy(value), inner


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _same(now: Any, then: Any, content: Any) -> bool:
    if now is not then:
        return type(now) is type(then) and isinstance(now, bool | int | float | str | None) and now == then
    if isinstance(now, Tensor):
        return torch.equal(now, content)
    if content is None:
        return True
    if _is_array(now):
        return bool(now.shape == content.shape and now.tobytes() == content.tobytes())
    shallow, inner = content
    if isinstance(now, dict):
        same = list(now) == list(shallow) and all(now[key] is shallow[key] for key in shallow)
    elif isinstance(now, set):
        same = now == shallow
    else:
        same = len(now) == len(shallow) and all(a is b for a, b in zip(now, shallow, strict=True))
    return same and all(_same(one, one, its) for one, its in inner)


def _refill(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(content)
        return
    if _is_array(value):
        value[...] = content
        return
    shallow, inner = content
    value.clear()
    value.extend(shallow) if isinstance(value, list | deque) else value.update(shallow)
    for one, its in inner:
        if not _same(one, one, its):
            _refill(one, its)
