"""The random generators that samplers and streams have of their own: ``WeightedRandomSampler(..., generator=...)``.

What they draw goes on from epoch to epoch, so a run that goes on needs them as they stood when its epoch was opened.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

_HOLDERS = ("sampler", "batch_sampler", "samplers", "base_sampler")  # where samplers keep those that they draw from


class OwnGenerators:
    """Those of ``loader`` that draw in this process: of its samplers, and of a stream or a loader of the project's.
    Those of a data set, whose draws belong to its samples, are none of them."""

    def __init__(self, loader: Any) -> None:
        self._found = list(_generators(loader))
        self._opened: tuple[int, list[Any]] | None = None
        self._resumed: list[Any] | None = None

    def opening(self, epoch: int) -> None:
        """``epoch`` is about to be opened, which may draw; nothing to do where it was opened before."""
        if self._resumed is not None:
            for generator, (_, state) in zip(self._found, self._resumed, strict=True):
                _restore(generator, state)
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
        if [kind for kind, _ in states] == [_kind(generator) for generator in self._found]:
            self._resumed = states
        elif states:
            rank_zero_warn(
                "a loader's samplers draw from other random generators than in the run that goes on: theirs begin anew,"
                " so the samples of its epochs are others."
            )

    def _now(self) -> list[Any]:
        return [[_kind(generator), _state(generator)] for generator in self._found]


def _generators(loader: Any) -> Iterator[Any]:
    if isinstance(loader, DataLoader):
        owners = [loader.sampler, loader.batch_sampler]
        if isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0:
            owners.append(loader.dataset)
        found = [loader.generator]
    else:
        owners, found = [loader], []
    seen: dict[int, Any] = {}
    while owners:
        owner = owners.pop(0)
        if id(owner) in seen or not hasattr(owner, "__dict__"):
            continue
        seen[id(owner)] = owner
        found += vars(owner).values()
        for name in _HOLDERS:
            held = vars(owner).get(name)
            owners += held if isinstance(held, (list, tuple)) else [held]
    yield from {id(one): one for one in found if isinstance(one, _kinds())}.values()


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    ours: tuple[type, ...] = (torch.Generator, random.Random)
    return ours if numpy is None else (*ours, numpy.random.Generator, numpy.random.RandomState)


def _kind(generator: Any) -> str:
    return type(getattr(generator, "bit_generator", generator)).__name__


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
