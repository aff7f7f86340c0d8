"""A stream's batches, cut before they are collated: a list of samples has one meaning, what became of it has many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.batch_fingerprint import fingerprint
from drivetrain.batch_parts import part
from drivetrain.loaders import reading_options
from drivetrain.stateful_loader import Stateful
from drivetrain.strategy import Shard


class Part(NamedTuple):
    """A rank's part of a batch of ``total`` samples, None where it has none; ``mark``: of the first that a process
    makes, the fingerprint of all its samples."""

    total: int
    batch: Any
    mark: float = 0.0


class Collated:
    """Collates this rank's samples of a batch by ``collate``.

    Args:
        shard: this rank's part.
        whole_tail: as :func:`drivetrain.batch_parts.part` takes it.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], shard: Shard, whole_tail: bool) -> None:
        self.collate, self.shard, self.whole_tail = collate, shard, whole_tail
        self._first = True

    def __call__(self, samples: list[Any]) -> Part:
        mark = fingerprint(samples) if self._first else 0.0
        self._first = False
        rows, _ = part(len(samples), self.shard, self.whole_tail)
        return Part(len(samples), self.collate(samples[rows]) if rows.start < rows.stop else None, mark)


def collates_a_stream(loader: Any) -> bool:
    """Whether ``loader`` makes batches of the samples of a stream, and has no reading of its own."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and not isinstance(loader, Stateful)
    )


def parted(loader: DataLoader[Any], shard: Shard, whole_tail: bool) -> DataLoader[Any]:
    """``loader`` giving a :class:`Part` for each batch."""
    options = reading_options(loader)
    options["collate_fn"] = Collated(options["collate_fn"], shard, whole_tail)
    generator: torch.Generator | None = loader.generator
    return DataLoader(loader.dataset, loader.batch_size, drop_last=loader.drop_last, generator=generator, **options)
