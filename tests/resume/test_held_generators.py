"""Generators that data sets hold in less usual places draw by sample in loader processes as well."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from drivetrain.seeded_dataset import Seeded


class InSlots:
    __slots__ = ("draws",)

    def __init__(self) -> None:
        self.draws = random.Random(1)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return index + self.draws.random()


class BesideSlots(InSlots):
    """Has a ``__dict__`` beside what its parent keeps in slots."""


@dataclasses.dataclass(slots=True)
class SlottedDataclass:
    draw: Any

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return index + self.draw.random()


class IsList(list[float]):
    def __init__(self) -> None:
        super().__init__(map(float, range(100)))
        self.draws = random.Random(1)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) + self.draws.random()


class IsDict(dict[int, float]):
    def __init__(self) -> None:
        super().__init__(enumerate(map(float, range(4))))
        self.draws = random.Random(1)

    def __getitem__(self, index: int) -> float:
        return super().__getitem__(index) + self.draws.random()


class Calls:
    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        draw = self.draw
        if isinstance(draw, (list, set, np.ndarray)):
            draw = next(iter(draw)).random
        elif isinstance(draw, np.random.BitGenerator):
            draw = draw.random_raw
        return index + draw()

    def draw_again(self) -> float:
        return self.draw()


class InDeque(Calls):
    def __init__(self) -> None:
        self.steps = deque([random.Random(1)], maxlen=2)
        super().__init__(self._first)

    def _first(self) -> float:
        return float(self.steps[0].random())


class OfTheClass(Calls):
    draws = random.Random(1)

    def __init__(self) -> None:
        super().__init__(self._draw)

    def _draw(self) -> float:
        return self.draws.random()


OF_THE_MODULE = random.Random(1)


def of_the_module() -> float:
    return OF_THE_MODULE.random()


class MadeForTheFirst(Calls):
    """Makes its generator when a process reads the first sample."""

    def __init__(self) -> None:
        self.made: random.Random | None = None
        super().__init__(self._draw)

    def _draw(self) -> float:
        self.made = random.Random(1) if self.made is None else self.made
        return self.made.random()


class Deep(Calls):
    def __init__(self) -> None:
        draw: Callable[[], float] = random.Random(1).random
        for _ in range(9):
            draw = Calls(draw).draw_again
        super().__init__(draw)


@pytest.mark.parametrize(
    "make",
    [
        InSlots,
        BesideSlots,
        lambda: SlottedDataclass(random.Random(1)),
        IsList,
        IsDict,
        lambda: Calls(random.Random(1).random),
        InDeque,
        OfTheClass,
        lambda: Calls(of_the_module),
        MadeForTheFirst,
        Deep,
        lambda: Calls([random.Random(1)] * 100),
        lambda: Calls({random.Random(1)}),
        lambda: Calls(np.array([random.Random(1)])),
        lambda: Calls(np.random.PCG64(1)),
    ],
    ids=[
        *("slots", "beside slots", "slotted dataclass", "a list", "a dict", "a bound method", "a deque", "a class"),
        *("a module", "made late", "deep", "many", "a set", "an array of objects", "bits"),
    ],
)
def test_a_sample_draws_the_same_whatever_was_read_before_it(make: Callable[[], Any]) -> None:
    forwards, backwards = Seeded(make(), seed=7), Seeded(make(), seed=7)
    assert [forwards[(1, index)] for index in range(4)] == [backwards[(1, index)] for index in (3, 2, 1, 0)][::-1]
