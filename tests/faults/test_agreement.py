"""Ranks agree on points of a run that most of them go straight past."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from drivetrain import agreement
from drivetrain.agreement import Agreement
from tests.distributed import run_ranks
from tests.patience import SOON


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_LOOK_EVERY", 0.01)


def on_each(points: Callable[[Agreement], object], timeout: float = SOON) -> Callable[[int, int], object]:
    def work(rank: int, world_size: int) -> object:
        made = Agreement("test", rank, range(world_size), timeout)
        try:
            return points(made)
        finally:
            made.close()
            assert not [t for t in threading.enumerate() if t.name == "drivetrain-test"]

    return work


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ask_or_all_go_on(world_size: int) -> None:
    """An old question does not count where all have answered, however long the thread looks at it after that."""

    def points(agreement: Agreement) -> list[list[str]]:
        said = []
        for point in range(1, 9):
            if point % 3 == 0:
                agreement.passed = (point,)
                time.sleep(0.05 if agreement.rank else 0.0)
                continue
            heard: dict[int, str | None] = {}
            agreement.ask((point,), f"{agreement.rank} at {point}", heard.__setitem__)
            said.append([f"{rank}: {heard[rank]}" for rank in sorted(heard)])
        return said

    for rank, said in enumerate(run_ranks(on_each(points), world_size)):
        others = [other for other in range(world_size) if other != rank]
        assert said == [[f"{other}: {other} at {point}" for other in others] for point in (1, 2, 4, 5, 7, 8)]


def test_one_asks_and_the_others_are_busy() -> None:
    """What a rank went past is answered while its main thread waits; what it has not come to is not."""

    def points(agreement: Agreement) -> list[tuple[int, str | None]]:
        heard: list[tuple[int, str | None]] = []
        if agreement.rank == 1:
            agreement.ask((2, 5), "here", lambda rank, said: heard.append((rank, said)))
        else:
            agreement.passed = (2, 4)
            time.sleep(0.3)
            agreement.passed = (3, 0) if agreement.rank else (2, 5)
            time.sleep(1.0)
        return heard

    _, heard, _ = run_ranks(on_each(points), 3)
    assert sorted(heard) == [(0, None), (2, None)]


def test_two_ask_at_different_points() -> None:
    """The one that asks about the later point went past the earlier one."""

    def points(agreement: Agreement) -> list[str | None]:
        heard: list[str | None] = []
        if agreement.rank:
            agreement.passed = (1,)
        point = (2,) if agreement.rank else (1,)

        def hear(rank: int, said: str | None) -> None:
            heard.append(said)
            raise StopIteration

        with pytest.raises((StopIteration, TimeoutError)):
            agreement.ask(point, "asked", hear)
        time.sleep(0.5)
        return heard

    first, _ = run_ranks(on_each(points, timeout=2.0), 2)
    assert first == [None]


def test_a_rank_that_is_not_heard_of() -> None:
    def points(agreement: Agreement) -> str:
        if agreement.rank == 0:
            time.sleep(0.6)
            return ""
        try:
            agreement.ask((1,), "", lambda rank, said: None)
        except TimeoutError as error:
            return str(error)
        return "heard"

    assert run_ranks(on_each(points, timeout=0.2), 2)[1] == "nothing was heard of rank 0"
