"""A data set cut into one fixed part for each worker: disjoint, complete, the same on every rank.

Trainer does this for each batch by itself (:mod:`drivetrain.sharding`). This is for loops written by hand, and for
workers that must keep the same samples all along.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from drivetrain.comm.arguments import is_whole, number, require_name, require_workers
from drivetrain.errors import ConfigurationError

Method = Literal["contiguous", "strided", "weighted"]


class DataPartitioner:
    """Cuts ``dataset`` into one part for each of ``workers``; every rank makes the same parts without a message.

    ``contiguous``: a run of neighbours each. ``strided``: worker r has samples r, r + workers, and so on, which mixes
    data that are sorted. ``weighted``: runs whose lengths are in proportion to ``speeds``, so that unequal workers end
    their epochs together. Sizes differ by at most one; weighted ones by less than one from their exact shares (method
    of the largest remainder, the first of equals first).

    Args:
        dataset: has a length.
        workers: the number of parts.
        method: which samples go together.
        speeds: for ``weighted``, the samples per second of each worker, or any numbers in their proportion.
        shuffle: cut a random order of the samples instead of the one they have.
        seed: of that order; give the same on every rank.

    Raises:
        ConfigurationError: an argument does not fit, or the data set has no length or no index.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        workers: int,
        method: Method = "contiguous",
        *,
        speeds: Sequence[float] | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        require_workers(workers)
        require_name("partition", method, get_args(Method))
        if (method == "weighted") != (speeds is not None):
            raise ConfigurationError(f"method={method} and speeds={speeds}: speeds go with method='weighted' only.")
        indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset | Mapping) or not indexed:
            raise ConfigurationError(
                f"{type(dataset).__name__} cannot be cut, for it has no length or no index: split it where it is read."
            )
        self.dataset = dataset
        self.workers = workers
        self.method = method
        samples = len(dataset)  # type: ignore[arg-type]
        self._order: Sequence[int] = range(samples)
        if shuffle:
            if not is_whole(seed) or not -(2**63) <= seed < 2**64:
                raise ConfigurationError(f"seed={seed!r} of a partition: give a whole number of 64 bits.")
            self._order = torch.randperm(samples, generator=torch.Generator().manual_seed(int(seed))).tolist()
        self._sizes = _sizes(samples, [1] * workers if speeds is None else speeds, workers)
        self._starts = [0, *accumulate(self._sizes)]

    def partition_size(self, rank: int) -> int:
        """The number of samples of ``rank``."""
        return self._sizes[self._known(rank)]

    def get_indices(self, rank: int) -> list[int]:
        """The indices in the data set of the samples of ``rank``."""
        self._known(rank)
        if self.method == "strided":
            return list(self._order[rank :: self.workers])
        return list(self._order[self._starts[rank] : self._starts[rank + 1]])

    def get_partition(self, rank: int) -> Subset[Any]:
        """The samples of ``rank`` as a data set."""
        return Subset(self.dataset, self.get_indices(rank))  # type: ignore[arg-type]

    def _known(self, rank: int) -> int:
        if not is_whole(rank) or not 0 <= rank < self.workers:
            raise ConfigurationError(f"rank={rank!r} has no part: use one from 0 to {self.workers - 1}.")
        return rank


def _sizes(samples: int, speeds: Sequence[float], workers: int) -> list[int]:
    if not hasattr(speeds, "__len__") or isinstance(speeds, str | Mapping):
        raise ConfigurationError(f"speeds={speeds!r}: give a list with one number for each worker.")
    if len(speeds) != workers:
        raise ConfigurationError(f"there are {len(speeds)} speeds for {workers} workers: give one for each.")
    exact = []  # so that all machines cut alike
    for worker, speed in enumerate(speeds):
        found = number(speed)
        if found is None or not 0 < found < math.inf:
            raise ConfigurationError(f"the speed of worker {worker} is {speed}: give a number above 0.")
        exact.append(Fraction(found))
    shares = [samples * speed / sum(exact) for speed in exact]
    sizes = [int(share) for share in shares]
    by_remainder = sorted(range(workers), key=lambda worker: (sizes[worker] - shares[worker], worker))
    for worker in by_remainder[: samples - sum(sizes)]:
        sizes[worker] += 1
    return sizes
