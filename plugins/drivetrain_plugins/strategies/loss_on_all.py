"""Whether all ranks have a loss to go backward from, for engines whose ranks gather weights and reduce gradients within
a pass: one that has none has no pass to do its part in, and the others wait for it. Where none has one, nobody waits.
"""

from __future__ import annotations

from drivetrain.agreement import Agreement
from drivetrain.errors import TrainingError
from drivetrain.launch.job import Job

_NONE = "none"


class LossOnAll:
    """Counts the losses of the ranks of ``job``, which all take part in each backward pass."""

    def __init__(self, job: Job) -> None:
        self.rank = job.rank
        self._losses = 0
        # A little less than what NCCL waits for a collective, and then ends the process without these words.
        self._agreement = Agreement("loss", job.rank, range(job.world_size), 0.9 * job.timeout)

    def close(self) -> None:
        self._agreement.close()

    def one(self) -> None:
        """This rank goes backward from a loss, and asks nobody."""
        self._losses += 1
        self._agreement.passed = (self._losses,)

    def none(self, way_out: str) -> None:
        """This rank has no loss: hear whether the others have.

        Args:
            way_out: what to use instead, at the end of the sentence.

        Raises:
            TrainingError: a rank has one.
        """
        self._losses += 1

        def heard(rank: int, theirs: str | None) -> None:
            if theirs != _NONE:
                raise TrainingError(
                    f"training_step returned None on rank {self.rank}: with sharded parameters every rank takes part in"
                    f" every backward pass, and rank {rank} has a loss; return a loss times 0.0 instead, or {way_out}."
                )

        try:
            self._agreement.ask((self._losses,), _NONE, heard)
        except TimeoutError as error:
            raise TrainingError(f"training_step returned None on rank {self.rank}, and {error}") from None
