"""A loader over the same data set whose batch sampler is ours: it hands out this rank's samples of each batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler
from torch.utils.data import SequentialSampler as InOrder

from drivetrain.loaders import reading
from drivetrain.private_random import mix
from drivetrain.sample_orders import Dealt, EpochOrder, Joined, ShardedBatches
from drivetrain.seeded_dataset import Seeded, reseed
from drivetrain.strategy import Shard


@dataclass(frozen=True)
class Resharded:
    """What :func:`resharded` makes of a loader.

    Attributes:
        reader: gives this rank's part of each batch, collated.
        sampler: chooses their samples.
        batches: the samples of the global batches.
        order: the samples' order, where it is ours; None where it is that of the project's own batch sampler.
        of_run: whether ``order`` is drawn by the run's seed, not by one of the project's sampler.
    """

    reader: DataLoader[Any]
    sampler: ShardedBatches
    batches: Any
    order: EpochOrder | None
    of_run: bool

    def reseed(self, seed: int) -> None:
        """Give what the one of a run of this seed gives."""
        if self.order is not None and self.of_run:
            self.order.seed = seed
        if self.order is None:
            self.sampler.seed = seed
        reseed(self.reader.dataset, seed)
        self.reader.generator.manual_seed(mix(seed, 2**31))


def can_be_resharded(loader: Any, shard: Shard, mode: str) -> bool:
    """Whether the samples that ``loader`` reads are chosen by a batch sampler, which may be another then; not where the
    project deals them out itself."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and not (mode == "per_process" and _parted_by_its_own_rule(loader, shard))
    )


def _parted_by_its_own_rule(loader: DataLoader[Any], shard: Shard) -> bool:
    """Whether the project deals out the samples by a sampler that is not torch's or for other processes."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return isinstance(sampler, DistributedSampler) and (
        type(sampler) is not DistributedSampler or sampler.num_replicas != shard.size
    )


def resharded(
    loader: DataLoader[Any],
    shard: Shard,
    seed: int,
    *,
    mode: str,
    training: bool,
    whole_tail: bool,
    in_order: bool,
    as_sampler: bool,
) -> Resharded:
    """``loader`` for this rank; arguments as those of :class:`drivetrain.sharding.BatchSource`.

    Args:
        as_sampler: whether samples are dealt out in the order of a ``DistributedSampler``.
    """
    batches: Any = loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    factor = shard.size if mode == "per_process" else 1
    dataset: Any = loader.dataset
    order: EpochOrder | None = None
    of_run = False
    source: Iterable[Any]
    if type(batches) is BatchSampler and isinstance(sampler, (RandomSampler, InOrder, DistributedSampler)):
        drawn = sampler if isinstance(sampler, RandomSampler) else None
        shuffle = sampler.shuffle if isinstance(sampler, DistributedSampler) else drawn is not None
        if as_sampler and mode == "per_process" and training and type(sampler) is InOrder:
            shuffle = True  # what Lightning says of use_distributed_sampler, and does
        shuffle = shuffle and not in_order
        own = getattr(sampler, "generator", None)
        of_run = own is None and not isinstance(sampler, DistributedSampler)
        order_seed, samples = seed if own is None else own.initial_seed(), len(dataset)
        if isinstance(sampler, DistributedSampler):
            order_seed = sampler.seed
            samples = min(samples, sampler.total_size) if sampler.drop_last else samples
        elif drawn is not None:
            samples = drawn.num_samples
        replacement = drawn is not None and drawn.replacement
        order = EpochOrder(len(dataset), order_seed, shuffle, replacement, samples, as_sampler)
        source = BatchSampler(order, batches.batch_size * factor, batches.drop_last)
    else:
        source = batches if factor == 1 else Joined(batches, factor)
    if as_sampler and mode == "per_process":
        source = Dealt(source, shard.size)
    seeded = loader.num_workers > 0
    ours = ShardedBatches(source, shard, whole_tail, seeded, seed if order is None else None)
    # Its own generator: making an iterator draws a seed, which must not come from the run's random numbers.
    generator = torch.Generator().manual_seed(mix(seed, 2**31))
    if seeded:
        dataset = Seeded(dataset, seed, loader.collate_fn, tells=shard.size > 1 and shard.rank == 0)
    return Resharded(reading(loader, dataset, ours, generator), ours, source, order, of_run)
