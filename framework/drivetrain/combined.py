"""Several loaders read as one: a batch is the collection of one batch of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

from torch.utils._pytree import tree_flatten, tree_unflatten

from drivetrain.errors import ConfigurationError, nearest

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")


def combined_length(mode: str, lengths: list[int | float]) -> int | float:
    """Batches that come of loaders with ``lengths`` (``inf`` where unknown)."""
    if not lengths:
        return 0
    if mode == "min_size":
        return min(lengths)
    return sum(lengths) if mode == "sequential" else max(lengths)


def zipped(mode: str, openings: list[Callable[[], Iterator[Any]]]) -> Iterator[list[Any]]:
    """One item of each reader at a time. ``max_size_cycle`` opens a reader that is used up again, until the longest is;
    ``max_size`` gives None for it; ``min_size`` ends with the shortest."""
    readers = [opening() for opening in openings]
    used_up = [False] * len(readers)
    while readers:
        items: list[Any] = []
        for number, reader in enumerate(readers):
            item = next(reader, _END)
            if item is _END:
                if mode == "min_size":
                    return
                used_up[number] = True
                if all(used_up):
                    return
                if mode == "max_size_cycle":
                    readers[number] = openings[number]()
                    item = next(readers[number], _END)
                    if item is _END:
                        raise ConfigurationError(
                            f"loader {number} of those that are read at once has no batch, and so none to begin again"
                            " with: leave it out, or give CombinedLoader(loaders, 'max_size'), where it counts as None."
                        )
                else:
                    item = None
            items.append(item)
        yield items


_END = object()


class CombinedLoader:
    """Loaders in any nesting of dicts, lists and tuples, with Lightning's modes.

    Iterating gives ``(batch, batch_idx, dataloader_idx)``. ``mode="sequential"`` reads one after the other,
    ``"min_size"`` all at once until the shortest ends, ``"max_size"`` until the longest ends with None for the others,
    ``"max_size_cycle"`` until the longest ends while the others begin again.
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        if mode not in MODES:
            raise ConfigurationError(f"CombinedLoader(mode={mode!r}): {nearest(str(mode), MODES)}")
        self.iterables = iterables
        self.mode = mode
        self._flattened, self._spec = tree_flatten(iterables, is_leaf=_is_loader)
        self._limited: list[int | float] | None = None
        self._iterator: Iterator[tuple[Any, int, int]] | None = None

    @property
    def flattened(self) -> list[Any]:
        """The loaders, without their nesting; to set it is to put others in their places."""
        return self._flattened

    @flattened.setter
    def flattened(self, loaders: list[Any]) -> None:
        if len(loaders) != len(self._flattened):
            raise ValueError(f"{len(loaders)} loaders do not stand in the places of {len(self._flattened)}.")
        self.iterables, self._flattened = self.rebuilt(loaders), loaders

    @property
    def limits(self) -> list[int | float] | None:
        """Batches that are read of each loader, of all together where they are read at once; None for all.

        To set one number is to set it for each.

        Raises:
            ValueError: there are not as many as loaders.
        """
        return self._limited

    @limits.setter
    def limits(self, limits: int | float | list[int | float] | None) -> None:
        if isinstance(limits, (int, float)):
            limits = [limits] * len(self.flattened)
        if limits is not None and len(limits) != len(self.flattened):
            raise ValueError(f"{len(limits)} limits are not one for each of {len(self.flattened)} loaders.")
        self._limited = limits

    @property
    def _mode(self) -> str:
        return self.mode

    def _limits(self) -> list[int | None]:
        limits = self.limits or [float("inf")] * len(self.flattened)
        return [None if limit == float("inf") else int(limit) for limit in limits]

    @property
    def batch_sampler(self) -> Any:
        return tree_unflatten([getattr(loader, "batch_sampler", None) for loader in self.flattened], self._spec)

    @property
    def sampler(self) -> Any:
        return tree_unflatten([getattr(loader, "sampler", None) for loader in self.flattened], self._spec)

    def reset(self) -> None:
        """Forget the iteration that was begun."""
        self._iterator = None

    def __iter__(self) -> CombinedLoader:
        self._iterator = self._read()
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._iterator is None:
            raise StopIteration
        return next(self._iterator)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_iterator": None}  # an iteration that was begun is not copied, nor sent to others

    def _read(self) -> Iterator[tuple[Any, int, int]]:
        limits = self._limits()
        if self.mode == "sequential":
            for number, (loader, limit) in enumerate(zip(self.flattened, limits, strict=True)):
                for index, batch in enumerate(loader):
                    if limit is not None and index >= limit:
                        break
                    yield batch, index, number
            return
        openings = [_opening(loader, limit) for loader, limit in zip(self.flattened, limits, strict=True)]
        for index, items in enumerate(zipped(self.mode, openings)):
            yield tree_unflatten(items, self._spec), index, 0

    def rebuilt(self, leaves: list[Any]) -> Any:
        """``leaves``, one for each loader, in the nesting of the loaders."""
        return tree_unflatten(leaves, self._spec)

    def __len__(self) -> int:
        lengths = []
        for loader, limit in zip(self.flattened, self._limits(), strict=True):
            length: int | float = len(loader) if isinstance(loader, Sized) else float("inf")
            lengths.append(length if limit is None else min(length, limit))
        length = combined_length(self.mode, lengths)
        if length == float("inf"):
            raise NotImplementedError("a loader without a length is among them")
        return int(length)


def _is_loader(node: Any) -> bool:
    """Whether ``node`` is read, and no nesting of what is: a list of plain values is a loader that gives these."""
    if not isinstance(node, (dict, list, tuple)):
        return True
    return all(isinstance(child, (int, float, str)) for child in (node.values() if isinstance(node, dict) else node))


def _opening(loader: Any, limit: int | None) -> Callable[[], Iterator[Any]]:
    def opening() -> Iterator[Any]:
        for index, batch in enumerate(loader):
            if limit is not None and index >= limit:
                return
            yield batch

    return opening
