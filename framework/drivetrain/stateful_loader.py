"""A loader that says itself where it stands: torchdata's StatefulDataLoader, a project's own streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """What has a state of its own, and goes on from it when it is iterated next."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Places:
    """Where ``loader`` stood after each batch that a checkpoint may go on from.

    Attributes:
        kept: how many batches back that may be; 0: it is asked only where a checkpoint is made.
    """

    def __init__(self, loader: Stateful) -> None:
        self.loader = loader
        self.kept = 0
        self._read = 0
        self._states: dict[int, dict[str, Any]] = {}  # by the number of batches that were read
        self._resumed_from: dict[str, Any] | None = None

    def after(self, batches: int) -> dict[str, Any] | None:
        """Its state when ``batches`` of the epoch had been read; None where that is not known any more."""
        return self.loader.state_dict() if batches == self._read else self._states.get(batches)

    def go_on_from(self, state: dict[str, Any]) -> None:
        """What is read next, from another batch than the first on, goes on from there."""
        self._resumed_from = state

    def resume(self, start: int) -> bool:
        """Put the loader where it stood; False where nothing is known of that, or the epoch begins."""
        state, self._resumed_from = self._resumed_from, None
        if state is None or start == 0:
            return False
        self.loader.load_state_dict(state)
        return True

    def following(self, numbered: Iterable[tuple[int, Any]], start: int) -> Iterator[tuple[int, Any]]:
        """``numbered`` batches as they are read from number ``start`` on."""
        self._read, self._states = start, {}
        for index, batch in numbered:
            self._read = index + 1
            yield index, batch
            if self.kept:  # before the next one is read
                self._states[index + 1] = self.loader.state_dict()
                self._states.pop(index + 1 - self.kept, None)
