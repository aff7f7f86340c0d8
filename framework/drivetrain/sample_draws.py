"""What a data set draws from random generators of its own, in this process, when it makes a sample: an augmentation
with a ``numpy.random.Generator``, a collation that masks words with a ``torch.Generator``.

Such draws go on from sample to sample, so a run that goes on needs the generators as they stood after the last batch
that was trained on, on each rank its own. Of a data set that processes of the loader read see
:mod:`drivetrain.seeded_dataset`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from drivetrain.own_generators import held_within, kind_of, put_back, state_of
from drivetrain.rank_zero import rank_zero_warn


class SampleDraws:
    """Where the generators stood after each batch that a checkpoint may go on from.

    Args:
        loaders: gives those that are read, one or several at once.

    Attributes:
        kept: how many batches back that may be; 0: they are looked at only where a checkpoint is made.
    """

    def __init__(self, loaders: Callable[[], list[Any]]) -> None:
        self._loaders = loaders
        self.kept = 0
        self._read = 0
        self._states: dict[int, list[Any]] = {}  # by the number of batches that were read
        self._resumed: list[Any] = []

    def _found(self) -> list[Any]:
        """Looked for anew each time: a data set may make its generators when it is read, or for each epoch."""
        found = [one for loader in self._loaders() for one in _drawing(loader)]
        return [*{id(one): one for one in found}.values()]

    def now(self) -> list[Any]:
        """Their states, for :meth:`go_on_from`."""
        return self._resumed or _states(self._found())

    def after(self, batches: int) -> list[Any]:
        """Their states when ``batches`` of the epoch had been read."""
        return self.now() if batches == self._read else self._states.get(batches) or self.now()

    def go_on_from(self, states: list[Any] | None, by_process: Sequence[Any] = ()) -> None:
        """What is read next draws from these; None: they are of ranks that shared out the data otherwise.

        Args:
            by_process: loaders whose processes, where they have some, draw as they come, and not by sample.
        """
        self._resumed = states or []
        if states is None and self._found():
            rank_zero_warn(
                "the checkpoint is of another number of workers: the random generators that a data set has of its own"
                " begin anew, so its samples are others."
            )
        if any(isinstance(loader, DataLoader) and loader.persistent_workers for loader in by_process):
            rank_zero_warn(
                "training data is read by processes that stay (persistent_workers=True), whose random generators begin"
                " anew in a run that goes on: where it draws there, its samples are others; use"
                " persistent_workers=False for the same."
            )

    def resume(self) -> None:
        """Put the generators where they stood: now, since what comes before the first batch may draw from them, too."""
        states, self._resumed = self._resumed, []
        found = self._found()
        if [kind for kind, _ in states] == [kind_of(generator) for generator in found]:
            for generator, (_, state) in zip(found, states, strict=True):
                put_back(generator, state)
        elif states:
            rank_zero_warn(
                "a data set draws from other random generators than in the run that goes on: its own begin anew, so its"
                " samples are others."
            )

    def begin(self, start: int) -> None:
        """Batches are read from number ``start`` on."""
        self._read, self._states = start, {}

    def following(self, batches: Iterable[Any], start: int) -> Iterator[Any]:
        """``batches`` as they are read from number ``start`` on."""
        self.begin(start)
        found = self._found() if self.kept else []
        if found:
            self._states[start] = _states(found)
        for number, batch in enumerate(batches, start + 1):
            self._read = number
            yield batch
            if found:  # before the next one is read
                self._states[number] = _states(found)
                self._states.pop(number - self.kept, None)


def _drawing(loader: Any) -> list[Any]:
    """The generators from which samples of ``loader`` are made in this process."""
    if not isinstance(loader, DataLoader) or loader.num_workers > 0:
        return []
    within = [] if isinstance(loader.dataset, IterableDataset) else held_within(loader.dataset)
    return [*within, *held_within(loader.collate_fn)]


def _states(generators: list[Any]) -> list[Any]:
    return [[kind_of(generator), state_of(generator)] for generator in generators]
