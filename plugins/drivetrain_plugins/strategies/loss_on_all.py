"""Whether all ranks have a loss to go backward from, for engines whose ranks gather weights and reduce gradients
together, within a pass or at the end of a window: one that has none goes along with zeros where it knows how, or has
nothing to do its part in, and the others wait for it. Every rank tells in the job's store how far it is, and only a
rank without a loss looks there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from drivetrain.announcements import Announcements
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
        self._told = _announcements("loss", job)

    def step(self) -> None:
        """The next micro-batch."""
        self._steps += 1

    def forward(self) -> None:
        """This rank gathers weights within it, which it can only do with all others."""
        self._told.tell(self._steps, _FORWARD)

    def backward(self) -> None:
        """It goes backward. A pass that a module makes itself is in no step, and nobody asks about it."""
        if self._steps:
            self._told.tell(self._steps, _BACKWARD)

    def over(self, weighted: bool, through: str) -> None:
        """It has gone backward from a loss, with a weight of its own or not, through what ``through`` names."""
        self._over(Pass(True, weighted, through))

    def _over(self, made: Pass) -> None:
        self._told.tell(self._steps, _OVER, json.dumps(asdict(made)))

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
            made = Pass(**json.loads(theirs)) if theirs is not None else Pass(loss=True)
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

        self._over(Pass(loss=False, through=through))
        self._ask(_OVER, heard)
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
            if theirs is None or Pass(**json.loads(theirs)) != none:
                raise TrainingError(
                    f"training_step returned None on rank {self.rank}: with sharded parameters every rank takes part in"
                    f" every backward pass, and rank {rank} has a loss; return a loss times 0.0 instead, or {way_out}."
                )

        none = Pass(loss=False)
        self._over(none)
        self._ask(_BACKWARD if forward else _FORWARD, heard)

    def _ask(self, moment: int, heard: Callable[[int, str | None], None]) -> None:
        try:
            self._told.ask(self._steps, moment, heard)
        except TimeoutError as error:
            raise TrainingError(f"training_step returned None on rank {self.rank}, and {error}") from None


class WindowOnAll:
    """Whether any rank of ``job`` had a loss in an accumulation window, at the end of which all reduce and step."""

    def __init__(self, job: Job) -> None:
        self.rank = job.rank
        self._windows = 0
        self._told = _announcements("window", job)

    def over(self, loss: bool, weighted: bool) -> tuple[bool, bool]:
        """The end of this rank's window.

        Args:
            loss: whether there was one in it.
            weighted: whether that came with a weight of its own.

        Returns:
            Both, of the ranks that had a loss: of this one if it had, else of the others.

        Raises:
            TrainingError: this rank had none, and another did not come to the end of its window.
        """
        self._windows += 1
        self._told.tell(self._windows, 0, json.dumps([loss, weighted]))
        if loss:
            return loss, weighted

        def heard(rank: int, theirs: str | None) -> None:
            nonlocal loss, weighted
            had, weighs = json.loads(theirs) if theirs is not None else (True, False)
            loss, weighted = loss or had, weighted or weighs

        try:
            self._told.ask(self._windows, 0, heard)
        except TimeoutError as error:
            raise TrainingError(f"rank {self.rank} had no loss in its last window, and {error}") from None
        return loss, weighted


def _announcements(name: str, job: Job) -> Announcements:
    # A little less than what NCCL waits for a collective, and then ends the process without these words.
    return Announcements(name, job.rank, range(job.world_size), 0.9 * job.timeout)
