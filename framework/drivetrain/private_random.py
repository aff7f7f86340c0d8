"""Reading data with random generators of its own, so that the same numbers come again when an epoch is read again.

What a user's stream or sampler draws from the global generators would depend on what training drew meanwhile, and on
how far ahead the reader was when a checkpoint was made; on ranks that read the same stream it would differ.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_STORED: tuple[type, ...] = (
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
)  # iterators over what is there draw nothing


class PrivateRandom:
    """``iterable``, read with the generators of torch's CPU, Python and numpy seeded by ``seed``; those that others
    use stay untouched. ``opening``: only making the iterator draws (loader processes get their seeds there).

    Swapping generators costs some hundred microseconds an item, so it is left out where items are stored already."""

    def __init__(self, iterable: Iterable[Any], seed: int, opening: bool = False) -> None:
        self.iterable, self.seed, self.opening = iterable, seed, opening

    def __iter__(self) -> Iterator[Any]:
        own: list[Any] = []
        with _swapped(own):
            torch.random.default_generator.manual_seed(self.seed)
            random.seed(self.seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(self.seed & 0xFFFFFFFF)
            iterator = iter(self.iterable)
        return iterator if self.opening or type(iterator) in _STORED else self._drawn(iterator, own)

    def _drawn(self, iterator: Iterator[Any], own: list[Any]) -> Iterator[Any]:
        while True:
            with _swapped(own):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item


@contextmanager
def _swapped(own: list[Any]) -> Iterator[None]:
    """Put ``own`` (empty: leave what is there) in the generators' place, and keep there what they come to be."""
    outer = states()
    if own:
        restore(own)
    try:
        yield
    finally:
        own[:] = states()
        restore(outer)


def states() -> list[Any]:
    """The states of torch's CPU, Python's and numpy's generators."""
    numpy = sys.modules.get("numpy")
    return [torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()]


def restore(kept: list[Any]) -> None:
    """Put the generators where :func:`states` found them."""
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])
    if kept[2] is not None:
        sys.modules["numpy"].random.set_state(kept[2])


def mix(seed: int, epoch: int) -> int:
    """A 63-bit seed in which (1, 0) and (0, 1) are far apart (splitmix64's finaliser)."""
    x = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 1
