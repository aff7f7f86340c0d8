"""Whether all ranks end an epoch early together, asked only when one of them does.

A rank whose ``on_train_batch_start`` returned -1 goes on to the epoch's end; one whose hook did not goes on to the
gradients. Each would wait for the other until the time-out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from drivetrain.agreement import Agreement
from drivetrain.errors import TrainingError

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


class EarlyEnd:
    """The agreement of one run."""

    def __init__(self, trainer: Trainer) -> None:
        self.rank = trainer.global_rank
        mine = torch.tensor([float(self.rank)], dtype=torch.float64, device=trainer.strategy.device)
        ranks = [int(rank) for rank in trainer.strategy.gather(mine)]
        self._agreement = Agreement("early-end", self.rank, ranks, trainer.timeout)

    def close(self) -> None:
        self._agreement.close()

    def went_on(self, epoch: int, batch: int) -> None:
        """This rank goes on with ``batch`` of ``epoch``."""
        self._agreement.passed = (epoch, batch)

    def agree(self, epoch: int, batch: int) -> None:
        """Return when all ranks end ``epoch`` before ``batch``.

        Raises:
            TrainingError: another rank went on with this batch, or nothing was heard of it until the time-out.
        """

        def heard(rank: int, theirs: str | None) -> None:
            if theirs is None:
                raise TrainingError(self._words(epoch, batch, f"rank {rank} went on"))

        try:
            self._agreement.ask((epoch, batch), "ended", heard)
        except TimeoutError as error:
            raise TrainingError(self._words(epoch, batch, str(error))) from None

    def _words(self, epoch: int, batch: int, what: str) -> str:
        return (
            f"on_train_batch_start returned -1 on rank {self.rank} at batch {batch} of epoch {epoch} and {what}: return"
            " -1 on all ranks at the same batch, by something that they all know, such as batch_idx or a logged metric."
        )
