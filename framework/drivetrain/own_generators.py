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
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

_DEPTH = 5  # a subset of a data set with a transform that is a list of objects with generators
_MOST = 64  # of transforms or data sets in a collection: a longer one holds samples
_HOLDERS = ("sampler", "batch_sampler", "samplers", "base_sampler")  # where samplers keep those that they draw from


class OwnGenerators:
    """Those of ``loader`` that draw in this process: of its samplers, and of a stream or a loader of the project's.
    Those of a data set, whose draws belong to its samples, are none of them.

    Attributes:
        found: the generators.
    """

    def __init__(self, loader: Any) -> None:
        self.found = list(_generators(loader))
        self._opened: tuple[int, list[Any]] | None = None
        self._resumed: list[Any] | None = None

    def opening(self, epoch: int) -> None:
        """``epoch`` is about to be opened, which may draw; nothing to do where it was opened before."""
        if self._resumed is not None:
            for generator, (_, state) in zip(self.found, self._resumed, strict=True):
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
        if [kind for kind, _ in states] == [kind_of(generator) for generator in self.found]:
            self._resumed = states
        elif states:
            rank_zero_warn(
                "a loader's samplers draw from other random generators than in the run that goes on: theirs begin anew,"
                " so the samples of its epochs are others."
            )

    def _now(self) -> list[Any]:
        return [[kind_of(generator), state_of(generator)] for generator in self.found]


def _generators(loader: Any) -> Iterator[Any]:
    within: list[Any] = []
    if isinstance(loader, DataLoader):
        owners = [loader.sampler, loader.batch_sampler]
        if isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0:
            within = held_within(loader.dataset)
        found = [loader.generator]
    else:
        owners, found = [loader], []
    seen: dict[int, Any] = {}
    while owners:
        owner = owners.pop(0)
        if id(owner) in seen:
            continue
        seen[id(owner)] = owner
        attributes = _attributes(owner)
        found += attributes.values()
        for name in _HOLDERS:
            held = attributes.get(name)
            owners += held if isinstance(held, (list, tuple)) else [held]
    found += within
    yield from {id(one): one for one in found if isinstance(one, _kinds())}.values()


def held_within(owner: Any, depth: int = _DEPTH) -> list[Any]:
    """The generators that ``owner`` holds as attributes, and those of what it holds: the data set within a subset, a
    transform, the transforms of a chain of them. In the order of the attributes, each once; the global ones are none of
    its own."""
    found: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    ahead = [(owner, depth)]
    while ahead:
        one, left = ahead.pop(0)
        if isinstance(one, _kinds()):
            if not any(one is each for each in _global()):
                found[id(one)] = one
        elif id(one) not in seen and left >= 0:
            seen[id(one)] = one
            ahead += [(held, left - 1) for held in _held(one)]
    return [*found.values()]


def _held(one: Any) -> Iterable[Any]:
    if isinstance(one, functools.partial):
        return (one.func, *one.args, *one.keywords.values())
    if isinstance(one, (types.MethodType, types.BuiltinMethodType)):
        return (one.__self__,)
    if isinstance(one, types.FunctionType):
        return [*_closed_over(one), *(one.__defaults__ or ())]
    if isinstance(one, (type, types.ModuleType, Tensor)):
        return ()
    within: Iterable[Any] = ()
    if isinstance(one, (Mapping, list, tuple, deque)) and len(one) <= _MOST:
        within = one.values() if isinstance(one, Mapping) else one
    return [*within, *_attributes(one).values()]


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


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # one that is empty as yet
            yield cell.cell_contents


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    ours: tuple[type, ...] = (torch.Generator, random.Random)
    return ours if numpy is None else (*ours, numpy.random.Generator, numpy.random.RandomState)


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
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def put_back(generator: Any, state: Any) -> None:
    """Let ``generator`` stand where :func:`state_of` found it."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


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
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed & 0xFFFFFFFF)
