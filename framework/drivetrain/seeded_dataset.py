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

_OWN = "_Seeded__"  # how Python calls its attributes


class Seeded:
    """A map-style data set in a loader worker: its random draws depend on seed, epoch and sample, not on the worker.

    All else is the data set's, also what is set: a ``worker_init_fn`` finds it in the place of that.

    Args:
        seed: of the run; generators of the data set's own also draw by what they were seeded with.
        collate: what makes batches of its samples.
    """

    def __init__(self, dataset: Any, seed: int, collate: Any = None) -> None:
        self.__dataset, self.__run_seed, self.__collate = dataset, seed, collate
        self.__marks = [mark_of(generator) for generator in self.__held()]
        self.__generators: list[Any] | None = None  # as this process has them

    def __getattr__(self, name: str) -> Any:
        if name == "__getitems__" and hasattr(self.__dataset, name):
            return self.__many
        if name.startswith(_OWN) or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.__dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(_OWN):
            object.__setattr__(self, name, value)
        else:
            setattr(self.__dataset, name, value)

    def __seeded(self, key: tuple[int, Any]) -> Any:
        epoch, index = key
        number = mix(mix(self.__run_seed, epoch), index if isinstance(index, int) else hash(index) & 0xFFFFFFFF)
        torch.manual_seed(number)
        random.seed(number)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(number & 0xFFFFFFFF)
        self.__generators = self.__held() if self.__generators is None else self.__generators
        for mark, generator in zip(self.__marks, self.__generators, strict=False):
            seed_anew(generator, mix(number, mark))
        return index

    def __held(self) -> list[Any]:
        found = [*held_within(self.__dataset), *held_within(self.__collate)]
        return [*{id(one): one for one in found}.values()]

    def __getitem__(self, key: tuple[int, Any] | list[tuple[int, Any]]) -> Any:
        if isinstance(key, list):  # of a loader that asks for a whole batch at once
            self.__seeded(key[0])
            return self.__dataset[[index for _, index in key]]
        return self.__dataset[self.__seeded(key)]

    def __many(self, keys: list[tuple[int, Any]]) -> Any:
        self.__seeded(keys[0])
        return self.__dataset.__getitems__([index for _, index in keys])

    def __len__(self) -> int:
        return len(self.__dataset)


def reseed(dataset: Any, seed: int) -> None:
    """Let ``dataset``, where it is a :class:`Seeded`, draw what one of a run of this seed draws."""
    if isinstance(dataset, Seeded):
        setattr(dataset, f"{_OWN}run_seed", seed)
