"""The random generators that samplers, streams and data sets have of their own:
``WeightedRandomSampler(..., generator=...)``, an augmentation with a ``numpy.random.Generator``.

What they draw goes on from epoch to epoch. A run that goes on needs those of samplers and streams, which are read again
from their beginning, as they stood when its epoch was opened; those of a data set as they stood after the last sample
that was trained on, see :mod:`drivetrain.sample_draws`.
"""

from __future__ import annotations

import functools
import random
import sys
import types
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.rank_zero import rank_zero_warn

_LOOKED_AT = 5000  # objects, which takes some ten milliseconds
_MOST = 64  # of transforms or data sets in a collection: a longer one holds samples
_LIBRARIES = sys.stdlib_module_names | {
    "torch",
    "numpy",
    "drivetrain",
}  # whose classes and modules have none to draw by
_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_READ_FOR_SAMPLES = ("dataset", "collate_fn", "worker_init_fn", "_iterator")  # of a loader, and not for their order


class OwnGenerators:
    """Those of ``loader`` that draw in this process: of its samplers, and of a stream or a loader of the project's.
    Those of a data set, whose draws belong to its samples, are none of them."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._opened: tuple[int, list[Any]] | None = None
        self._resumed: list[Any] | None = None

    def opening(self, epoch: int) -> None:
        """``epoch`` is about to be opened, which may draw; nothing to do where it was opened before."""
        if self._resumed is not None:
            for generator, (_, state) in zip(_ordering(self._loader), self._resumed, strict=False):
                put_back(generator, state)
            self._resumed = None
        if self._opened is None or self._opened[0] != epoch:
            self._opened = epoch, self._now()

    def after(self, epoch: int, ended: bool) -> list[Any]:
        """Their states as ``epoch`` was opened, from which it is read again; as they are where it was not, or has
        ``ended``."""
        if self._resumed is not None:
            return self._resumed
        if self._opened is None or self._opened[0] != epoch or ended:
            return self._now()
        return self._opened[1]

    def go_on_from(self, states: list[Any]) -> None:
        """The epoch that is opened next draws from these ``states``; of other generators they are left out."""
        if [kind for kind, _ in states] == [kind_of(generator) for generator in _ordering(self._loader)]:
            self._resumed = states
        elif states:
            rank_zero_warn(
                "a loader's samplers draw from other random generators than in the run that goes on: theirs begin anew,"
                " so the samples of its epochs are others."
            )

    def _now(self) -> list[Any]:
        return [[kind_of(generator), state_of(generator)] for generator in _ordering(self._loader)]


def _ordering(loader: Any) -> list[Any]:
    """Looked for anew each time: a sampler may make its generator when it is read first."""
    if not isinstance(loader, DataLoader):
        return held_within(loader)
    owners: list[Any] = [loader.generator, loader.sampler, loader.batch_sampler]
    if type(loader) is not DataLoader:  # one that may draw by itself
        owners += [held for name, held in vars(loader).items() if name not in _READ_FOR_SAMPLES]
        owners += _of_class(type(loader))
    if isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0:
        return held_within(*owners, loader.dataset)
    return held_within(*owners, apart=loader.dataset)


def held_within(*owners: Any, apart: Any = None) -> list[Any]:
    """The generators that ``owners`` hold as attributes, and those of what they hold: the data set within a subset, a
    transform, the transforms of a chain of them. Also those that their class has, and those of a module that its code
    names. In the order of the attributes, each once; the global ones are none of their own.

    Args:
        apart: what holds is not looked into.
    """
    seen: dict[int, Any] = {}
    if apart is not None:
        _search([apart], seen)
    return _search(owners, seen)


def _search(owners: Iterable[Any], seen: dict[int, Any]) -> list[Any]:
    """The generators that are within ``owners``, past what was ``seen``, which what is looked at is added to."""
    found: dict[int, Any] = {}
    most = len(seen) + _LOOKED_AT
    kinds, ahead = _kinds(), deque(owners)
    while ahead:
        one = ahead.popleft()
        if isinstance(one, kinds):
            if not any(one is each for each in _global()):
                found[id(one)] = one
        elif id(one) not in seen and len(seen) < most:
            seen[id(one)] = one
            ahead += [held for held in _held(one) if not isinstance(held, _PLAIN)]
    return [*found.values()]


def _held(one: Any) -> Iterable[Any]:
    if isinstance(one, functools.partial):
        return (one.func, *one.args, *one.keywords.values())
    if isinstance(one, (types.MethodType, types.BuiltinMethodType)):
        return (one.__self__,)
    if isinstance(one, types.FunctionType):
        given = (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values())
        return [*_closed_over(one), *given, *_named_in(one)]
    if isinstance(one, (type, types.ModuleType, Tensor)) or type(one).__module__.startswith("drivetrain."):
        return ()
    return [*_members(one), *_attributes(one).values(), *_of_class(type(one))]


def _members(one: Any) -> Iterable[Any]:
    """Of a collection, unless it holds samples."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(one, numpy.ndarray):
        found = one.ravel() if one.dtype == object else ()
    elif isinstance(one, (Mapping, list, tuple, deque, set, frozenset)):
        found = one.values() if isinstance(one, Mapping) else one
    else:
        return ()
    if len(found) <= _MOST:
        return found
    stored = type(one).__module__ in ("builtins", "collections", "numpy")  # else looking at it may make samples
    return found if stored and isinstance(next(iter(found)), _kinds()) else ()


def _attributes(one: Any) -> dict[str, Any]:
    """Those of ``one`` itself by name, also where its class keeps them in ``__slots__``."""
    found = dict(vars(one)) if hasattr(one, "__dict__") else {}
    for kind in type(one).__mro__:
        slots = vars(kind).items() if "__slots__" in vars(kind) else ()
        for name, slot in slots:
            if isinstance(slot, types.MemberDescriptorType):
                with suppress(AttributeError):  # one that is not set
                    found[name] = slot.__get__(one, kind)
    return found


def _of_class(kind: type) -> Iterator[Any]:
    """What ``kind`` and its parents have for all of their objects, where they are none of a library's."""
    for each in kind.__mro__:
        if not _is_of_library(each.__module__):
            for held in vars(each).values():
                held = held.fget if isinstance(held, property) else held
                yield held.__func__ if isinstance(held, (staticmethod, classmethod)) else held


def _named_in(function: types.FunctionType) -> Iterator[Any]:
    """What the code of ``function`` names of its module, and the generators that it names of another or of a class."""
    if _is_of_library(function.__module__):
        return
    names, codes = dict[str, None](), [function.__code__]
    for code in codes:
        names |= dict.fromkeys(code.co_names)
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    for found in [function.__globals__[name] for name in names if name in function.__globals__]:
        if isinstance(found, (type, types.ModuleType)):
            yield from (one for one in map(vars(found).get, names) if isinstance(one, _kinds()))
        else:
            yield found


def _is_of_library(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in _LIBRARIES


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # one that is empty as yet
            yield cell.cell_contents


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    ours: tuple[type, ...] = (torch.Generator, random.Random)
    theirs = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    return (*ours, *theirs)


def _global() -> Iterator[Any]:
    yield torch.default_generator
    yield getattr(random, "_inst", None)
    yield getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)


def kind_of(generator: Any) -> str:
    """The name of its algorithm, or of its class."""
    return type(getattr(generator, "bit_generator", generator)).__name__


def state_of(generator: Any) -> Any:
    """What :func:`put_back` takes."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "get_state"):  # of numpy's older kind
        return generator.get_state()
    return getattr(generator, "bit_generator", generator).state


def put_back(generator: Any, state: Any) -> None:
    """Let ``generator`` stand where :func:`state_of` found it."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


def mark_of(generator: Any) -> int:
    """A number of 32 bits or more in which ``generator`` differs from those that were seeded otherwise."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    return zlib.crc32(repr(state_of(generator)).encode())


def seed_anew(generator: Any, seed: int) -> None:
    """Let ``generator`` draw what one of its kind with this ``seed`` (63 bits) draws."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif hasattr(generator, "set_state"):
        generator.seed(seed & 0xFFFFFFFF)
    else:
        bits = getattr(generator, "bit_generator", generator)
        bits.state = type(bits)(seed).state
