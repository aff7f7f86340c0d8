"""What can change within an object while it stays the same object: a copy to compare it with, and to put it back to.

Containers, tensors, arrays and generators of random numbers are looked into, and the attributes of the project's own
objects, also those that are within containers or within one another.
"""

from __future__ import annotations

import copy
import random
import sys
from array import array
from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.module import TrainModule

_DEPTH = 4  # of objects and containers within one another
_MOST = 64  # items of a container, of which tensors are copied too: what has more holds them to be read
_VISITS = 2_000  # of all that is looked at: a module that keeps a data set is not gone through at every batch
_MEANT = {"types", "argparse", "builtins"}  # of the standard library: plain holders of attributes
_NOT_THE_PROJECTS = {"torch", "torchmetrics", "drivetrain", "drivetrain_plugins", "lightning"} | (
    sys.stdlib_module_names - _MEANT
)
_CONTAINERS = (list, dict, set, deque, bytearray, array, tuple)
_NO_HOLDERS = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, Tensor, *_CONTAINERS)
_OF_ANY_MODULE = frozenset(vars(TrainModule()))


class Copies:
    """Makes copies of what is in objects, of each once.

    Args:
        left: how many objects are looked at before the rest is left out.
        values: whether tensors and arrays are copied. Else it only shows of a tensor whether it was written to, which
            neither copies nor waits for a device, and of an array nothing.
    """

    def __init__(self, left: int = _VISITS, values: bool = True) -> None:
        self.left, self.values = left, values
        self._seen: set[int] = set()

    def first(self, value: Any) -> bool:
        """Whether ``value`` was not met before; others that lead to it need not look into it."""
        known = id(value) in self._seen
        self._seen.add(id(value))
        return not known

    def of(self, value: Any, depth: int = _DEPTH, tensors: bool = True) -> Any:
        """A copy of what is in ``value``, None where nothing in it can change or where it was met before."""
        self.left -= 1
        if isinstance(value, bool | int | float | str | None):
            return None
        if isinstance(value, Tensor):
            plain = value.layout is torch.strided and not (value.is_meta or value.is_nested or value.is_quantized)
            kind = _Values if self.values else _Writes
            return kind(value) if plain and tensors and self.first(value) else None
        if _is_array(value):
            return _Array(value) if self.values and tensors and self.first(value) else None
        if _is_generator(value):
            return _Draws(value) if self.first(value) else None
        if isinstance(value, _CONTAINERS):
            return _Items(value, self, depth, tensors) if self.first(value) else None
        if depth and self.left > 0 and is_holder(value) and self.first(value):
            return Attributes(value, self, depth - 1, tensors)
        return None


class _Writes:
    def __init__(self, tensor: Tensor) -> None:
        self.written = _writes(tensor)

    def same(self, now: Tensor, draws: bool) -> bool:
        """Also what was written to and has the values that it had counts as changed: a sum, of nothing this time."""
        return _writes(now) == self.written


class _Values(_Writes):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.copy = tensor.detach().clone()

    def same(self, now: Tensor, draws: bool) -> bool:
        return super().same(now, draws) and self.equal(now)

    def equal(self, now: Tensor) -> bool:
        if now.shape != self.copy.shape or torch.equal(now, self.copy):
            return now.shape == self.copy.shape
        both = (now == self.copy) | (now.isnan() & self.copy.isnan())  # not a number is what it was
        return bool(both.all())

    def put_back(self, tensor: Tensor) -> None:
        inference = tensor.is_inference() or torch.is_inference_mode_enabled()
        with torch.inference_mode(inference), torch.no_grad():  # in this order: the first turns gradients on
            if tensor.shape != self.copy.shape:
                tensor.data = self.copy.clone()
            elif not self.equal(tensor):
                tensor.copy_(self.copy)
        self.written = _writes(tensor)


class _Array:
    def __init__(self, value: Any) -> None:
        self.copy = value.copy()

    def same(self, now: Any, draws: bool) -> bool:
        return bool(now.shape == self.copy.shape and now.tobytes() == self.copy.tobytes())

    def put_back(self, value: Any) -> None:
        if not self.same(value, True):
            value[...] = self.copy


class _Draws:
    """Of a generator, which a step draws from: every rank's stands where the others' do."""

    def __init__(self, generator: Any) -> None:
        self.state = _state(generator)

    def same(self, now: Any, draws: bool) -> bool:
        return not draws or repr(_state(now)) == repr(self.state)

    def put_back(self, generator: Any) -> None:
        if isinstance(generator, random.Random):
            generator.setstate(self.state)
        elif isinstance(generator, torch.Generator):
            generator.set_state(torch.tensor(self.state, dtype=torch.uint8))
        else:
            generator.bit_generator.state = self.state


class _Items:
    def __init__(self, value: Any, copies: Copies, depth: int, tensors: bool) -> None:
        self.copy = value if isinstance(value, tuple) else copy.copy(value)
        self.inner = []
        if depth and not isinstance(value, set | bytearray | array):
            for one in value.values() if isinstance(value, dict) else value:
                if copies.left <= 0:
                    break
                within = copies.of(one, depth - 1, tensors and len(value) <= _MOST)
                if within is not None:
                    self.inner.append((one, within))

    def same(self, now: Any, draws: bool) -> bool:
        then = self.copy
        if isinstance(now, dict):
            same = list(now) == list(then) and all(now[key] is then[key] for key in then)
        elif isinstance(now, list | deque):
            same = len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))
        else:
            same = now is then or now == then
        return same and all(within.same(one, draws) for one, within in self.inner)

    def put_back(self, value: Any) -> None:
        if isinstance(value, list | bytearray | array):
            value[:] = self.copy  # type: ignore[assignment]
        elif not isinstance(value, tuple):
            value.clear()
            value.extend(self.copy) if isinstance(value, deque) else value.update(self.copy)
        for one, within in self.inner:
            within.put_back(one)


class Attributes:
    """Of an object, by their names."""

    def __init__(self, owner: Any, copies: Copies, depth: int = _DEPTH, tensors: bool = True) -> None:
        self.then = {name: (value, copies.of(value, depth, tensors)) for name, value in attributes_of(owner).items()}

    def changed(self, owner: Any, draws: bool) -> list[str]:
        """Names of those that are something else now, came to be, or are gone."""
        now = attributes_of(owner)
        found = [n for n in now if n not in self.then or not _same(now[n], *self.then[n], draws)]
        return found + [name for name in self.then if name not in now]

    def same(self, now: Any, draws: bool) -> bool:
        return not self.changed(now, draws)

    def put_back(self, owner: Any) -> None:
        """Past what the object's class may say to it: a frozen data class refuses both."""
        held, slots = vars(owner) if _has_dict(owner) else {}, _slots(owner)
        for name in [name for name in attributes_of(owner) if name not in self.then]:
            if name in held:
                del held[name]
            else:
                slots[name].__delete__(owner)
        for name, (value, content) in self.then.items():
            if content is not None and not content.same(value, True):
                content.put_back(value)
            if name in slots:
                slots[name].__set__(owner, value)
            else:
                held[name] = value


def _same(now: Any, then: Any, content: Any, draws: bool) -> bool:
    if now is then:
        return content is None or content.same(now, draws)
    if type(now) is not type(then):
        return False
    if isinstance(now, tuple):
        return len(now) == len(then) and all(_same(a, b, None, draws) for a, b in zip(now, then, strict=True))
    if not (isinstance(now, bool | int | float | str) or _is_number(now)):
        return False
    return bool(now == then or repr(now) == repr(then))  # not a number is what it was


def is_holder(value: Any) -> bool:
    """Whether ``value`` is an object of the project's own, no container, which may keep something in attributes."""
    if isinstance(value, _NO_HOLDERS) or not (_has_dict(value) or _slots(value)):
        return False
    return type(value).__module__.partition(".")[0] not in _NOT_THE_PROJECTS


def attributes_of(owner: Any) -> dict[str, Any]:
    """What ``owner`` keeps by name; of a module not what every module has."""
    held = dict(vars(owner)) if _has_dict(owner) else {}
    if isinstance(owner, nn.Module):
        held = {name: value for name, value in held.items() if name not in _OF_ANY_MODULE}
    return held | dict(_filled(owner))


def _filled(owner: Any) -> Iterator[tuple[str, Any]]:
    for name, slot in _slots(owner).items():
        try:
            yield name, slot.__get__(owner)
        except AttributeError:  # nothing is in it yet
            continue


def _has_dict(owner: Any) -> bool:
    return type(owner).__dictoffset__ != 0


def _slots(owner: Any) -> dict[str, Any]:
    """Where ``__slots__`` of its classes keep what; of classes that are written in C there is nothing to see."""
    found: dict[str, Any] = {}
    for kind in type(owner).__mro__:
        if "__slots__" in vars(kind):
            found |= {name: one for name, one in vars(kind).items() if isinstance(one, MemberDescriptorType)}
    return found


def _writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _numpy() -> Any:
    return sys.modules.get("numpy")


def _is_array(value: Any) -> bool:
    return _numpy() is not None and isinstance(value, _numpy().ndarray)


def _is_number(value: Any) -> bool:
    return _numpy() is not None and isinstance(value, _numpy().generic)


def _is_generator(value: Any) -> bool:
    known = (random.Random, torch.Generator, *((_numpy().random.Generator,) if _numpy() is not None else ()))
    return isinstance(value, known) and not isinstance(value, random.SystemRandom)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state().tolist() if isinstance(generator, torch.Generator) else generator.bit_generator.state
