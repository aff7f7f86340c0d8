"""Whether all ranks end an epoch early together, asked only when one of them does.

A rank whose ``on_train_batch_start`` returned -1 goes on to the epoch's end; one whose hook did not goes on to the
gradients. Each would wait for the other until the time-out. A rank that ends therefore asks the job's store, and on
every rank a thread looks there now and then and answers for the loop, which may be waiting in a collective. A batch
costs one assignment, an early end a few looks at the store.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from drivetrain.errors import TrainingError

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

_LOOK_EVERY = 0.5  # seconds between looks for a question
_runs = itertools.count()  # every rank makes the same runs in the same order


class EarlyEnd:
    """The agreement of one run; ``passed`` is ``(epoch, batch)`` of the last batch that this rank went on with."""

    def __init__(self, trainer: Trainer) -> None:
        self.rank, self.timeout = trainer.global_rank, trainer.timeout
        mine = torch.tensor([float(self.rank)], dtype=torch.float64, device=trainer.strategy.device)
        self.ranks = [int(rank) for rank in trainer.strategy.gather(mine)]
        self.passed = (-1, -1)
        default: Any = dist.distributed_c10d._get_default_store()
        self._store = default.clone()
        self._prefix = f"drivetrain/early_end/{next(_runs)}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="drivetrain-early-end", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def agree(self, epoch: int, batch: int) -> None:
        """Return when all ranks end ``epoch`` before ``batch``.

        Raises:
            TrainingError: another rank went on with this batch, or nothing was heard of it until the time-out.
        """
        self._store.set(f"{self._prefix}/{epoch}/{self.rank}", "ended")
        self._store.set(f"{self._prefix}/{epoch}/question", str(batch))
        deadline = time.monotonic() + self.timeout
        for rank in self.ranks:
            key = f"{self._prefix}/{epoch}/{rank}"
            while not self._store.check([key]):
                if time.monotonic() > deadline:
                    raise TrainingError(self._words(epoch, batch, f"nothing was heard of rank {rank}"))
                time.sleep(0.02)
            if self._store.get(key) != b"ended":
                raise TrainingError(self._words(epoch, batch, f"rank {rank} went on"))

    def _words(self, epoch: int, batch: int, what: str) -> str:
        return (
            f"on_train_batch_start returned -1 on rank {self.rank} at batch {batch} of epoch {epoch} and {what}: return"
            " -1 on all ranks at the same batch, by something that they all know, such as batch_idx or a logged metric."
        )

    def _answer(self) -> None:
        answered = -1
        while not self._over.wait(_LOOK_EVERY):
            epoch, batch = self.passed
            question = f"{self._prefix}/{epoch}/question"
            try:
                if epoch > answered and self._store.check([question]) and batch >= int(self._store.get(question)):
                    self._store.set(f"{self._prefix}/{epoch}/{self.rank}", "went on")
                    answered = epoch
            except (RuntimeError, ValueError):  # the store went with the rank that held it, and that is told elsewhere
                return
