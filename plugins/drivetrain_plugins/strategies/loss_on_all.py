"""Whether all ranks have a loss to go backward from, for engines whose ranks gather weights and reduce gradients within
a pass: one that has none goes along with zeros where it knows how, or has no pass to do its part in, and the others
wait for it. Only a rank without a loss asks, in the job's store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from drivetrain.agreement import Agreement, Point
from drivetrain.errors import TrainingError
from drivetrain.launch.job import Job

_FORWARD, _BACKWARD, _OVER = 0, 1, 2  # weights are gathered for a step; its backward pass begins; that is over


@dataclass(frozen=True)
class Pass:
    """What a rank says of its pass.

    Attributes:
        loss: whether it was from a loss.
        weighted: whether that came with a weight of its own.
        through: what the pass went through; None of one that was not made.
    """

    loss: bool
    weighted: bool = False
    through: str | None = None


class LossOnAll:
    """Counts the losses of the ranks of ``job``, which all take part in each backward pass."""

    def __init__(self, job: Job) -> None:
        self.rank = job.rank
        self._steps = 0
        self._made: tuple[int, bool, Callable[[], str]] | None = None  # of which pass, and what is said of it
        # A little less than what NCCL waits for a collective, and then ends the process without these words.
        self._agreement = Agreement("loss", job.rank, range(job.world_size), 0.9 * job.timeout, self._says)

    def close(self) -> None:
        self._agreement.close()

    def _says(self, point: Point) -> str | None:
        if point[-1] != _OVER:
            return None
        made = self._made
        if made is None or made[0] != point[0]:  # what this rank went through then is not known any more
            return json.dumps(asdict(Pass(True)))
        return json.dumps(asdict(Pass(True, made[1], made[2]())))

    def step(self) -> None:
        """The next micro-batch; nobody is asked."""
        self._steps += 1

    def forward(self) -> None:
        """This rank gathers weights within it, which it can only do with all others."""
        self._agreement.passed = (self._steps, _FORWARD)

    def backward(self) -> None:
        """It goes backward."""
        self._agreement.passed = (self._steps, _BACKWARD)

    def over(self, weighted: bool, through: Callable[[], str]) -> None:
        """It has gone backward from a loss, with a weight of its own or not, through what ``through`` gives."""
        self._made = self._steps, weighted, through
        self._agreement.passed = (self._steps, _OVER)

    def went_along(self, through: str, together: Sequence[int], way_out: str) -> tuple[bool, bool]:
        """It has gone backward without a loss.

        Args:
            through: what its pass went through.
            together: ranks that compute each pass together with this one, each a part of the same numbers.
            way_out: what to use instead, at the end of the sentence.

        Returns:
            Whether some rank had a loss, and whether that came with a weight of its own.

        Raises:
            TrainingError: another rank's pass went through something else, or a rank of ``together`` has a loss.
        """
        loss = weighted = False

        def heard(rank: int, theirs: str | None) -> None:
            nonlocal loss, weighted
            made = Pass(**json.loads(theirs or "{}"))
            if made.loss and rank in together:
                raise TrainingError(
                    f"training_step returned None on rank {self.rank} and a loss on rank {rank}, which compute the same"
                    f" batch together: return None on both, a loss times 0.0 instead, or {way_out}."
                )
            if made.through != through:
                raise TrainingError(
                    f"training_step returned None on rank {self.rank}, whose part in the others' backward pass was that"
                    f" of its last step with a loss, and rank {rank} went through other parts of the module: return a"
                    f" loss times 0.0 instead, or {way_out}."
                )
            loss, weighted = loss or made.loss, weighted or made.weighted

        self._ask(_OVER, Pass(loss=False, through=through), heard)
        return loss, weighted

    def none(self, way_out: str, forward: bool = True) -> None:
        """This rank has no loss and cannot go along: hear whether the others have.

        Args:
            way_out: what to use instead, at the end of the sentence.
            forward: whether it gathered what a forward pass needs, so that others' are not waiting for it.

        Raises:
            TrainingError: a rank has one.
        """

        def heard(rank: int, theirs: str | None) -> None:
            if theirs is None:
                raise TrainingError(
                    f"training_step returned None on rank {self.rank}: with sharded parameters every rank takes part in"
                    f" every backward pass, and rank {rank} has a loss; return a loss times 0.0 instead, or {way_out}."
                )

        self._ask(_BACKWARD if forward else _FORWARD, Pass(loss=False), heard)

    def _ask(self, moment: int, mine: Pass, heard: Callable[[int, str | None], None]) -> None:
        try:
            self._agreement.ask((self._steps, moment), json.dumps(asdict(mine)), heard)
        except TimeoutError as error:
            raise TrainingError(f"training_step returned None on rank {self.rank}, and {error}") from None
