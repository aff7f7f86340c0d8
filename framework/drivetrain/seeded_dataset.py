"""A data set whose random draws (augmentation) do not depend on which loader process reads a sample, or when.

Also those from generators that the data set, its transforms or the loader's collation hold: each process has a copy of
them, made when an epoch begins, from which every epoch, and a run that goes on, would draw the first numbers again.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from drivetrain.own_generators import held_within, mark_of, seed_anew
from drivetrain.private_random import mix


class Seeded:
    """A map-style data set in a loader worker: its random draws depend on seed, epoch and sample, not on the worker.

    Args:
        seed: of the run; generators of the data set's own also draw by what they were seeded with.
        collate: what makes batches of its samples.
    """

    def __init__(self, dataset: Any, seed: int, collate: Any = None) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate
        self._marks = [mark_of(generator) for generator in self._held()]
        self._own: list[Any] | None = None  # the generators as this process has them
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = self._many

    def _seed(self, key: tuple[int, Any]) -> Any:
        epoch, index = key
        number = mix(mix(self.seed, epoch), index if isinstance(index, int) else hash(index) & 0xFFFFFFFF)
        torch.manual_seed(number)
        random.seed(number)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(number & 0xFFFFFFFF)
        self._own = self._held() if self._own is None else self._own
        for mark, generator in zip(self._marks, self._own, strict=False):
            seed_anew(generator, mix(number, mark))
        return index

    def _held(self) -> list[Any]:
        found = [*held_within(self.dataset), *held_within(self.collate)]
        return [*{id(one): one for one in found}.values()]

    def __getitem__(self, key: tuple[int, Any] | list[tuple[int, Any]]) -> Any:
        if isinstance(key, list):  # of a loader that asks for a whole batch at once
            self._seed(key[0])
            return self.dataset[[index for _, index in key]]
        return self.dataset[self._seed(key)]

    def _many(self, keys: list[tuple[int, Any]]) -> Any:
        self._seed(keys[0])
        return self.dataset.__getitems__([index for _, index in keys])

    def __len__(self) -> int:
        return len(self.dataset)
