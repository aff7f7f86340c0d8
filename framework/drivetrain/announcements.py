"""Where each rank is in a run and what it last said of a step, left in the job's store for those that want to know.

For what only some ranks ask while the others go straight on. Those need not be able to answer: a rank that runs ahead
on a GPU may be steps further, and whatever holds its interpreter until the rank that asks takes part in what comes next
keeps its other threads from running. So nobody answers. Every rank writes as it goes, which is one message that waits
for nobody, and a rank that asks reads.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

_FIRST_WAIT, _LAST_WAIT = 0.0002, 0.02  # seconds between looks
_KEPT = 64  # changes of what was said: a rank runs ahead by as many steps as its device has room for launches
_runs = itertools.count()  # every rank makes the same announcements in the same order


class Announcements:
    """What ``ranks`` tell of a run's steps. Steps are counted, and each has moments, numbered as they follow.

    Args:
        name: of what is told, for the store's keys.
        rank: this one's.
        ranks: all that take part.
        timeout: seconds after which a rank that has not come to what it is asked about counts as lost.
    """

    def __init__(self, name: str, rank: int, ranks: Sequence[int], timeout: float) -> None:
        self.rank, self.ranks, self.timeout = rank, list(ranks), timeout
        default: Any = dist.distributed_c10d._get_default_store()
        self._store = default.clone()
        self._prefix = f"drivetrain/{name}/{next(_runs)}"
        self._own = self._key(rank)
        self._spoken = -1  # the last step of which something was said
        self._said: list[tuple[int, str]] = []  # from which step on it was said
        self._text = "[]"

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def tell(self, step: int, moment: int, said: str | None = None) -> None:
        """This rank has come to ``moment`` of ``step``, and says something of the step, once."""
        if said is not None:
            self._spoken = step
            if not self._said or self._said[-1][1] != said:
                self._said = [*self._said[1 - _KEPT :], (step, said)]
                self._text = json.dumps(self._said)
        self._store.set(self._own, f"[{step}, {moment}, {self._spoken}, {self._text}]")

    def ask(self, step: int, moment: int, heard: Callable[[int, str | None], None]) -> None:
        """Return when all others have come to ``moment`` of ``step``.

        Args:
            heard: called with each of them and what it said of the step; None where it has not said anything of it, or
                that is forgotten. What it raises goes to the caller at once, so that nobody waits for the rest.

        Raises:
            TimeoutError: with the first rank that did not come.
        """
        waiting = [rank for rank in self.ranks if rank != self.rank]
        deadline, wait = time.monotonic() + self.timeout, _FIRST_WAIT
        while True:
            for rank in list(waiting):
                told = self._read(rank)
                if told is None or tuple(told[:2]) < (step, moment):
                    continue
                waiting.remove(rank)
                wait = _FIRST_WAIT
                of_step = [said for first, said in told[3] if first <= step] if told[2] >= step else []
                heard(rank, of_step[-1] if of_step else None)
            if not waiting:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing was heard of rank {waiting[0]}")
            time.sleep(wait)
            wait = min(2 * wait, _LAST_WAIT)

    def _read(self, rank: int) -> list[Any] | None:
        key = self._key(rank)
        if not self._store.check([key]):  # to get it would wait for it
            return None
        told: list[Any] = json.loads(self._store.get(key))
        return told
