"""Whether all ranks went past a point of a run alike, asked only by those that did not go straight on.

A collective cannot tell: a rank that goes straight on is in the next one already, and with NCCL the two would wait for
each other until the time-out. A rank that asks therefore does so in the job's store, and on every rank a thread looks
there now and then and answers for the main thread, which may be waiting in a collective. Going straight on costs one
assignment, a question a few looks at the store.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

_LOOK_EVERY = 0.5  # seconds between looks for a question
_FIRST_WAIT, _LAST_WAIT = 0.0002, 0.02  # seconds between looks for answers
_runs = itertools.count()  # every rank makes the same agreements in the same order

Point = tuple[int, ...]


class Agreement:
    """What ``ranks`` have to say about points of a run.

    Args:
        name: of what is agreed on, for the store's keys.
        rank: this one's.
        ranks: all that take part.
        timeout: seconds after which a rank that has not answered counts as lost.

    Attributes:
        passed: the last point that this rank went straight past; points grow.
    """

    def __init__(self, name: str, rank: int, ranks: Sequence[int], timeout: float) -> None:
        self.rank, self.ranks, self.timeout = rank, list(ranks), timeout
        self.passed: Point = ()
        default: Any = dist.distributed_c10d._get_default_store()
        self._store, self._looked = default.clone(), default.clone()  # one a thread: an answer may be long in coming
        self._prefix = f"drivetrain/{name}/{next(_runs)}"
        self._settled: Point = ()  # the last point that this rank asked about and that all have answered to
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._answer, name=f"drivetrain-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def ask(self, point: Point, mine: str, heard: Callable[[int, str | None], None]) -> None:
        """Tell the others ``mine`` about ``point`` and return when all have told theirs.

        Args:
            heard: called with each other rank and what it says, None of one that went straight past. What it raises
                goes to the caller at once, so that nobody waits for the rest.

        Raises:
            TimeoutError: with the first rank that nothing was heard of.
        """
        key = self._key(point, self.rank)
        self._store.set(key, json.dumps(mine))
        self._store.set(f"{self._prefix}/question/{self.rank}", json.dumps(point))
        self._store.add(f"{self._prefix}/questions", 1)
        waiting = {rank: self._key(point, rank) for rank in self.ranks if rank != self.rank}
        deadline, wait = time.monotonic() + self.timeout, _FIRST_WAIT
        while waiting:
            for rank in [rank for rank, theirs in waiting.items() if self._store.check([theirs])]:
                heard(rank, json.loads(self._store.get(waiting.pop(rank))))
                wait = _FIRST_WAIT
            if waiting:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nothing was heard of rank {next(iter(waiting))}")
                time.sleep(wait)
                wait = min(2 * wait, _LAST_WAIT)
        if self._settled:  # who has answered to this point has read all answers to those before
            self._store.delete_key(self._key(self._settled, self.rank))
        self._settled = point

    def _key(self, point: Point, rank: int) -> str:
        return f"{self._prefix}/{'-'.join(map(str, point))}/{rank}"

    def _answer(self) -> None:
        seen, open_ = 0, set[Point]()
        while not self._over.wait(_LOOK_EVERY):
            try:
                questions = self._looked.add(f"{self._prefix}/questions", 0)
                if questions == seen and not open_:
                    continue
                seen = questions
                for rank in self.ranks:
                    key = f"{self._prefix}/question/{rank}"
                    if rank != self.rank and self._looked.check([key]):
                        open_.add(tuple(json.loads(self._looked.get(key))))
                passed = self.passed  # read before what is settled, which is set before it
                for point in [point for point in open_ if self._settled < point <= passed]:
                    self._looked.set(self._key(point, self.rank), json.dumps(None))
                open_ = {point for point in open_ if point > passed}
            except (RuntimeError, ValueError):  # the store went with the rank that held it, and that is told elsewhere
                return
