"""A data set whose random draws (augmentation) do not depend on which loader process reads a sample, or when."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from drivetrain.private_random import mix


class Seeded:
    """A map-style data set in a loader worker: its random draws depend on seed, epoch and sample, not on the worker."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = self._many

    def _seed(self, key: tuple[int, Any]) -> Any:
        epoch, index = key
        number = mix(mix(self.seed, epoch), index if isinstance(index, int) else hash(index) & 0xFFFFFFFF)
        torch.manual_seed(number)
        random.seed(number)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(number & 0xFFFFFFFF)
        return index

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
