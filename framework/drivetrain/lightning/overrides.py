"""Samplers that deal samples out to ranks, for projects that make their own loaders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler

from drivetrain.lightning import deep_names

__path__: list[str] = []


class _Drawn(Dataset[Any]):
    """What a sampler gives, as a data set; drawn once for each epoch."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        if not isinstance(sampler, Sized) or len(sampler) == float("inf"):
            raise TypeError(f"{type(sampler).__name__} has no finite length, which dealing its samples out needs.")
        self.sampler = sampler
        self._numbers: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __getitem__(self, index: int) -> Any:
        if self._numbers is None:
            self.draw()
        assert self._numbers is not None
        return self._numbers[index]

    def draw(self) -> None:
        self._numbers = list(self.sampler)


class DistributedSamplerWrapper(DistributedSampler[Any]):
    """What ``sampler`` gives, dealt out to the ranks as a ``DistributedSampler`` does, with its arguments. ``sampler``
    must draw the same numbers on every rank."""

    dataset: Any

    def __init__(self, sampler: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(_Drawn(sampler), *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        self.dataset.draw()
        return (self.dataset[index] for index in super().__iter__())

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        tell = getattr(self.dataset.sampler, "set_epoch", None)
        if callable(tell):
            tell(epoch)


class UnrepeatedDistributedSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` that repeats and drops nothing, so that ranks may have one sample more or fewer: for
    evaluation. A shuffle comes from the epoch alone.

    Raises:
        TypeError: the data set has no length.
        ValueError: it has fewer samples than there are ranks, and not none.
    """

    dataset: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.dataset, Sized):
            raise TypeError(f"{type(self.dataset).__name__} has no length, which dealing its samples out needs.")
        self.total_size = len(self.dataset)
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))
        if 0 < self.total_size < self.num_replicas:
            raise ValueError(
                f"{self.total_size} samples cannot be dealt out to {self.num_replicas} ranks: each needs one at least."
            )

    def __iter__(self) -> Iterator[Any]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.epoch)
            order = torch.randperm(self.total_size, generator=generator).tolist()
        else:
            order = list(range(self.total_size))
        return iter(order[self.rank :: self.num_replicas])


class UnrepeatedDistributedSamplerWrapper(UnrepeatedDistributedSampler):
    """What ``sampler`` gives, dealt out as an :class:`UnrepeatedDistributedSampler` does."""

    def __init__(self, sampler: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(_Drawn(sampler), *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        self.dataset.draw()
        return (self.dataset[index] for index in super().__iter__())


deep_names.name_below(__name__)
