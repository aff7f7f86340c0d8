"""What a loader that is read as in a loop by hand draws from the global generators: whence it drew when its epoch was
opened, begun and read ahead, so that a run that goes on draws the same."""

from __future__ import annotations

from typing import Any

from drivetrain.private_random import restore, states
from drivetrain.rank_batches import Numbered


class NaturalDraws:
    """Of one loader, whose epoch may be read in several passes: one of several that are read at once begins again."""

    def __init__(self) -> None:
        self._drawn_from: list[list[Any]] = []  # the generators when the epoch was opened, and at its first batch
        self._resumed_from: list[list[Any]] = []
        self._pass = 0
        self._ahead_from: list[Any] = []  # the generators when the batch that is read ahead was asked for
        self._resumed_in = 0  # the pass that is begun as it was before, 0 for none

    @property
    def resumed(self) -> bool:
        """Whether it goes on from an epoch that was opened before."""
        return bool(self._resumed_from)

    def count(self, anew: bool) -> None:
        """A pass is about to be opened, ``anew`` the epoch's first."""
        self._pass = 1 if anew else self._pass + 1

    def opening(self) -> None:
        """The pass is opened now; where it is the one that is gone on from, with what it drew from then."""
        if self._pass == self._resumed_in:
            restore(self._resumed_from[0])
        self._drawn_from = [states()]

    def as_opened(self) -> None:
        """Put the generators where the epoch that is gone on from was opened."""
        restore(self._resumed_from[0])

    def as_begun(self) -> None:
        """Put them where its first batch was asked for."""
        restore(self._resumed_from[-1])

    def beginning(self) -> None:
        """The pass's first batch is about to be asked for."""
        if self._pass == self._resumed_in:
            self.as_begun()
            self._resumed_in = 0
        self._drawn_from.append(states())

    def as_read_ahead(self) -> None:
        """Put them where the batch after the last one that was trained was asked for, if one was."""
        if self._ahead_from:
            restore(self._ahead_from)

    def noting(self, numbered: Numbered) -> Numbered:
        """A checkpoint is made when the batch after it has been read: a run that goes on reads that one again. Noting
        costs what :class:`PrivateRandom` costs, some hundred microseconds."""
        while True:
            self._ahead_from = states()
            item = next(numbered, None)
            if item is None:
                return
            yield item

    def state_dict(self, at_once: list[NaturalDraws], ahead: bool) -> dict[str, Any]:
        """For a checkpoint within the epoch or at its end.

        Args:
            at_once: of the loaders that are read at once here, none at an epoch's end.
            ahead: whether a batch has been read ahead.
        """
        state: dict[str, Any] = {"drawn_from": self._drawn_from}
        if at_once:
            state["begun_again"] = [(one._pass, one._drawn_from) if one._pass > 1 else (0, []) for one in at_once]
        if ahead:
            state["ahead_from"] = self._ahead_from
        return state

    def load_state_dict(self, state: dict[str, Any], at_once: list[NaturalDraws]) -> None:
        self._resumed_from = state.get("drawn_from", [])
        self._ahead_from = state.get("ahead_from", [])
        for one, begun in zip(at_once, state.get("begun_again", []), strict=False):
            one._resumed_in, one._resumed_from = begun
