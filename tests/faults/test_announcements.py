"""Ranks tell where they are, and one that wants to know reads it, whatever the others are in."""

from __future__ import annotations

import ctypes
import time

import pytest

from drivetrain import announcements
from drivetrain.announcements import Announcements
from tests.distributed import run_ranks
from tests.patience import SOON

Heard = list[tuple[int, str | None]]


def heard(made: Announcements, step: int, moment: int) -> Heard:
    found: Heard = []
    made.ask(step, moment, lambda rank, said: found.append((rank, said)))
    return sorted(found)


def test_what_a_rank_said_of_a_step_long_past() -> None:
    """Also of steps of which it said the same as of the one before, and none of those that it is only about to end."""

    def work(rank: int, world_size: int) -> list[Heard]:
        made = Announcements("test", rank, range(world_size), SOON)
        if rank == 0:
            return [heard(made, *point) for point in ((7, 1), (1, 2), (2, 2), (3, 0), (4, 2), (5, 2), (6, 2))]
        for step, said in enumerate("aabbab", 1):
            made.tell(step, 0)
            made.tell(step, 2, said)
        time.sleep(0.2)
        made.tell(7, 0)
        made.tell(7, 1)
        return []

    said, *_ = run_ranks(work, 3)
    expected = [None, "a", "a", "b", "b", "a", "b"]
    assert said == [[(1, one), (2, one)] for one in expected]


def test_a_rank_that_holds_its_interpreter_is_heard() -> None:
    """As an extension does that waits without letting go of it."""

    def work(rank: int, world_size: int) -> tuple[Heard, float]:
        made = Announcements("test", rank, range(world_size), SOON)
        started = time.monotonic()
        if rank == 0:
            return heard(made, 3, 2), time.monotonic() - started
        made.tell(3, 2, "over")
        made.tell(4, 0)
        ctypes.PyDLL(None).usleep(2_000_000)  # called with the interpreter's lock, unlike time.sleep
        return [], time.monotonic() - started

    (found, waited), (_, held) = run_ranks(work, 2)
    assert found == [(1, "over")]
    assert waited < held


def test_a_rank_that_does_not_come() -> None:
    def work(rank: int, world_size: int) -> str:
        made = Announcements("test", rank, range(world_size), 0.2)
        made.tell(2, 1)
        if rank:
            time.sleep(0.6)
            return ""
        with pytest.raises(TimeoutError) as error:
            made.ask(2, 2, lambda rank, said: None)
        return str(error.value)

    assert run_ranks(work, 3)[0] == "nothing was heard of rank 1"


def test_what_is_heard_ends_the_wait() -> None:
    def work(rank: int, world_size: int) -> float:
        made = Announcements("test", rank, range(world_size), SOON)
        started = time.monotonic()
        if rank == 1:
            made.tell(1, 0)
        if rank:
            time.sleep(0.5)
            return 0.0

        def hear(rank: int, said: str | None) -> None:
            raise ValueError(rank)

        with pytest.raises(ValueError, match="1"):
            made.ask(1, 0, hear)
        return time.monotonic() - started

    assert run_ranks(work, 3)[0] < SOON


def test_only_so_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "_KEPT", 3)

    def work(rank: int, world_size: int) -> list[Heard]:
        made = Announcements("test", rank, range(world_size), SOON)
        if rank:
            for step in range(10):
                made.tell(step, 0, str(step))
            return []
        return [heard(made, 9, 0), heard(made, 7, 0), heard(made, 6, 0)]

    assert run_ranks(work, 2)[0] == [[(1, "9")], [(1, "7")], [(1, None)]]
