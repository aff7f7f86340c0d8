"""Sources made of what a project gives as its loaders: one, several to be read one after the other, or at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain.batch_limits import as_slice, limited
from drivetrain.batch_parts import MicroBatch
from drivetrain.combined import CombinedLoader, combined_length, zipped
from drivetrain.rank_batches import Alike
from drivetrain.sharding import BatchSource


class AtOnce:
    """The loaders of a :class:`CombinedLoader` read at once, each as this rank reads it: an iterable of collections.

    A limit is one of the collections: a shorter loader is read to its end, and begins again, within it. Loaders that
    are read one after the other have it each.
    """

    def __init__(self, combined: CombinedLoader, options: dict[str, Any]) -> None:
        self.combined = combined
        limit = options.get("limit")
        self.limit = None if combined.mode == "sequential" else limit
        of_each = {**options, "limit": limit if self.limit is None else None}
        self.sources = [BatchSource(loader, **{**of_each, "index": i}) for i, loader in enumerate(combined.flattened)]
        for source in self.sources:
            source.inner = True
        self._told = False

    @property
    def natural(self) -> bool:
        return all(source.natural for source in self.sources)

    def _openings(self) -> list[Callable[[], Iterator[MicroBatch]]]:
        return [partial(iter, source) for source in self.sources]

    def __iter__(self) -> Iterator[Any]:
        for source in self.sources:
            source.look()
        for source in self.sources:
            source.open(anew=True)
        return self._read()

    def _read(self) -> Iterator[Any]:
        if self.combined.mode == "sequential":
            for opening in self._openings():
                yield from (micro.batch for micro in opening())
            return
        for micros in islice(zipped(self.combined.mode, self._openings()), as_slice(self._length())):
            self._compare(micros)
            batch = self.combined.rebuilt([None if micro is None else micro.batch for micro in micros])
            copies = {micro.copies for micro in micros if micro is not None}
            yield batch if len(copies) > 1 or copies == {1} else Alike(batch, copies.pop())

    def _compare(self, micros: Sequence[MicroBatch | None]) -> None:
        """A loss of several batches counts for a rank as one: right where the rank has as much of each of them."""
        if self._told:
            return
        parts = [micro for micro in micros if micro is not None]
        if len({micro.weight / micro.total for micro in parts if micro.total}) > 1:
            self._told = True
            had = ", ".join(f"{micro.count} of {micro.total}" for micro in parts)
            warnings.warn(
                f"of loaders that are read at once a rank has unlike parts ({had} samples), so the mean of the ranks'"
                " losses is not quite the loss of one process: for that, make their batches as large as one another,"
                " or of sizes that the replicas divide, with drop_last=True.",
                stacklevel=2,
            )

    @property
    def endless(self) -> bool:
        """Whether it shows only in reading how many collections there are."""
        return any(source.full_length == float("inf") for source in self.sources)

    @property
    def most(self) -> int | None:
        """The most collections that there can be where only reading shows it, if that is known."""
        return as_slice(self._length()) if self.endless else None

    def _length(self) -> int | float:
        return combined_length(self.combined.mode, [limited(source.length, self.limit) for source in self.sources])

    def __len__(self) -> int:
        if self.endless:
            raise TypeError("a loader without a length is among them")
        return int(self._length())


def training_source(loaders: Any, **options: Any) -> BatchSource:
    """One source of the training loaders: of a collection of them, collections of batches (the shorter ones begin again
    until the longest ends, unless a :class:`CombinedLoader` says otherwise)."""
    if isinstance(loaders, Mapping) or (isinstance(loaders, (list, tuple)) and _holds_loaders(loaders)):
        loaders = CombinedLoader(loaders, "max_size_cycle")
    if not isinstance(loaders, CombinedLoader):
        return BatchSource(loaders, **options)
    if len(loaders.flattened) == 1 and loaders.iterables is loaders.flattened[0]:
        return BatchSource(loaders.flattened[0], **options)
    return _at_once(loaders, options)


def evaluation_sources(loaders: Any, **options: Any) -> list[BatchSource]:
    """A source for each loader, to be read one after the other: of one loader, or a collection of them, which may hold
    collections of loaders."""
    if loaders is None:
        return []
    if isinstance(loaders, CombinedLoader):
        if loaders.mode != "sequential":
            return [_at_once(loaders, options)]
        loaders = loaders.flattened
    if isinstance(loaders, Mapping) or _holds_loaders(loaders):
        return [BatchSource(loader, **{**options, "index": i}) for i, loader in enumerate(_within(loaders))]
    return [BatchSource(loaders, **options)]


def shown(loaders: Any, sources: list[BatchSource]) -> Any:
    """``loaders`` of an evaluation as hooks see them: each as it is dealt out to this rank, in the nesting that they
    were given in."""
    each = [one.shown for source in sources for one in source.at_once or [source]]
    if isinstance(loaders, CombinedLoader):
        return loaders.rebuilt(each)
    if all(one.shown is one.loader for source in sources for one in source.at_once or [source]):
        return loaders
    held = isinstance(loaders, Mapping) or _holds_loaders(loaders)
    return _as_nested(loaders, iter(each)) if held else each[0]


def _at_once(combined: CombinedLoader, options: dict[str, Any]) -> BatchSource:
    parts = AtOnce(combined, options)
    made = BatchSource(
        parts, **{**options, "limit": parts.most, "natural": parts.natural, "own": True, "numbers": False}
    )
    made.at_once, made.combined, made.limit_at_once = parts.sources, combined, parts.limit
    return made


def _within(loaders: Any) -> list[Any]:
    """The loaders of a collection, in its order, those of collections in it too."""
    found = []
    for item in loaders.values() if isinstance(loaders, Mapping) else loaders:
        found += _within(item) if _nests(item) else [item]
    return found


def _as_nested(loaders: Any, each: Iterator[Any]) -> Any:
    """What ``each`` gives, in the place of the loaders of a collection."""
    if isinstance(loaders, Mapping):
        return {name: _as_nested(item, each) if _nests(item) else next(each) for name, item in loaders.items()}
    found = [_as_nested(item, each) if _nests(item) else next(each) for item in loaders]
    return tuple(found) if isinstance(loaders, tuple) else found


def _nests(item: Any) -> bool:
    return isinstance(item, (Mapping, list, tuple)) and _holds_loaders(item)


def _holds_loaders(loaders: Any) -> bool:
    """Whether it is a collection of loaders, or of collections of such, and no loader itself (a list of batches). What
    has a DataLoader in it is one: no batch has."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if not isinstance(loaders, (list, tuple)):
        return isinstance(loaders, Sequence) and len(loaders) > 0 and all(_is_loader(item) for item in loaders)
    return len(loaders) > 0 and (all(map(_is_loader, loaders)) or any(map(_has_a_data_loader, loaders)))


def _has_a_data_loader(item: Any) -> bool:
    if isinstance(item, (Mapping, list, tuple)):
        return any(map(_has_a_data_loader, item.values() if isinstance(item, Mapping) else item))
    return isinstance(item, DataLoader)


def _is_loader(item: Any) -> bool:
    """Whether ``item`` gives batches, or is a collection of such: not a batch itself."""
    if isinstance(item, (Mapping, list, tuple)):
        return _holds_loaders(item)
    if isinstance(item, (torch.Tensor, str, bytes)) or hasattr(item, "__array__"):
        return False
    return isinstance(item, DataLoader) or hasattr(item, "__iter__") or hasattr(item, "__next__")
