"""A data set whose random draws (augmentation) do not depend on which loader process reads a sample, or when.

Also those from generators that the data set, its transforms or the loader's collation hold: each process has a copy of
them, made when an epoch begins, from which every epoch, and a run that goes on, would draw the first numbers again.
"""

from __future__ import annotations

import pickle
import random
import sys
import warnings
from collections.abc import Callable
from itertools import chain, count
from typing import Any

import torch
from torch.utils.data import StackDataset, Subset

from drivetrain.own_generators import held_within, mark_of, seed_anew, state_of
from drivetrain.private_random import mix, states

_OWN = "_Seeded__"  # how Python calls its attributes


class Seeded:
    """A map-style data set in a loader worker: its random draws depend on seed, epoch and sample, not on the worker.

    All else is the data set's, also what is set: a ``worker_init_fn`` finds it in the place of that.

    Args:
        seed: of the run; generators of the data set's own also draw by what they were seeded with.
        collate: what makes batches of its samples.
        tells: whether to warn where a data set draws that makes a batch at once, and so draws for the part of one that
            a rank has.
    """

    def __init__(self, dataset: Any, seed: int, collate: Any = None, tells: bool = False) -> None:
        self.__dataset, self.__run_seed, self.__collate, self.__tells = dataset, seed, collate, tells
        self.__marked = [(generator, mark_of(generator)) for generator in self.__held()]
        self.__generators: list[Any] | None = None  # as this process has them
        self.__complete = False  # whether it was looked for them when a sample had been made

    def __getattr__(self, name: str) -> Any:
        if name == "__getitems__" and _makes_batches(self.__dataset):
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
        marks = chain((mark for _, mark in self.__marked), count())  # those that were made here have their place's
        for mark, generator in zip(marks, self.__generators, strict=False):
            seed_anew(generator, mix(number, mark))
        return index

    def __made(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` gives. Where a generator came to be meanwhile, as one that is made for the first sample in each
        process, it gives that again, with this drawn by the sample, too."""
        made = make()
        if not self.__complete:
            self.__complete, known = True, self.__generators
            self.__generators = self.__held()
            if known is not None and {id(one) for one in self.__generators} - {id(one) for one in known}:
                self.__seeded(key)
                made = make()
        return made

    def __held(self) -> list[Any]:
        found = [*held_within(self.__dataset), *held_within(self.__collate)]
        return [*{id(one): one for one in found}.values()]

    def __getitem__(self, key: tuple[int, Any] | list[tuple[int, Any]]) -> Any:
        if isinstance(key, list):  # of a loader that asks for a whole batch at once
            return self.__at_once(self.__dataset.__getitem__, key)
        index = self.__seeded(key)
        return self.__made(key, lambda: self.__dataset[index])

    def __many(self, keys: list[tuple[int, Any]]) -> Any:
        return self.__at_once(self.__dataset.__getitems__, keys)

    def __at_once(self, make: Callable[[list[Any]], Any], keys: list[tuple[int, Any]]) -> Any:
        """What ``make`` gives for these samples, with the draws of the first of them."""
        self.__seeded(keys[0])
        indices = [index for _, index in keys]
        if not self.__tells:
            return self.__made(keys[0], lambda: make(indices))
        self.__tells, before = False, self.__states()
        made = self.__made(keys[0], lambda: make(indices))
        info = torch.utils.data.get_worker_info()
        if self.__states() != before and (info is None or info.id == 0):
            warnings.warn(
                f"{type(self.__dataset).__name__} draws random numbers and makes the samples of a batch at once, of"
                " which each worker has a part: they are not those of one process; draw in __getitem__, sample by"
                " sample, for the same.",
                stacklevel=2,
            )
        return made

    def __states(self) -> bytes:
        torchs, pythons, numpys = states()
        own = [state_of(generator) for generator in self.__generators or []]
        plain = [one.numpy() if isinstance(one, torch.Tensor) else one for one in (torchs, *own)]
        return pickle.dumps((plain, pythons, numpys))

    def __len__(self) -> int:
        return len(self.__dataset)

    def __take_marks(self, former: Seeded) -> None:
        """Let generators that ``former`` knew have the marks that they have there."""
        known = {id(generator): mark for generator, mark in former.__marked}
        self.__marked = [(one, known.get(id(one), mark)) for one, mark in self.__marked]


def _makes_batches(dataset: Any) -> bool:
    """Whether it gives a list of samples otherwise than one by one, as torch's subset does of a data set that gives
    single ones."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return any(map(_makes_batches, parts.values() if isinstance(parts, dict) else parts))
    return hasattr(dataset, "__getitems__")


def reseed(dataset: Any, seed: int) -> None:
    """Let ``dataset``, where it is a :class:`Seeded`, draw what one of a run of this seed draws."""
    if isinstance(dataset, Seeded):
        setattr(dataset, f"{_OWN}run_seed", seed)


def go_on_as(dataset: Any, former: Any) -> None:
    """Let ``dataset``, where both are a :class:`Seeded`, draw from the same generators as ``former`` does: of a loader
    that is asked for again, between which an evaluation in this process may have drawn from them."""
    if isinstance(dataset, Seeded) and isinstance(former, Seeded):
        getattr(dataset, f"{_OWN}take_marks")(former)
