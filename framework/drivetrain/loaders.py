"""Other loaders over the data set of a given one."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)


def in_order(loader: Any) -> Any:
    """A shuffled loader over its data set in order."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return loader
    if isinstance(loader.sampler, SequentialSampler):
        return loader
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        generator=loader.generator,
        **reading_options(loader),
    )


def dealt_to_one(loader: Any, seed: int, training: bool) -> Any:
    """``loader`` with the order of a ``DistributedSampler`` for one process: what Lightning reads by on one device of a
    distributed strategy. Training data is shuffled, whatever the loader says; other orders of its own (repeated
    draws, a project's sampler) are kept."""
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return loader
    if isinstance(loader.dataset, IterableDataset) or type(batches) is not BatchSampler:
        return loader
    sampler, dataset = batches.sampler, loader.dataset
    if type(sampler) is RandomSampler:
        if sampler.replacement or sampler.num_samples != len(sampler.data_source):
            return loader
    elif type(sampler) is not SequentialSampler or not training:
        return loader
    own = getattr(sampler, "generator", None)
    order: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=1, rank=0, seed=seed if own is None else own.initial_seed()
    )
    return DataLoader(
        dataset,
        batch_size=batches.batch_size,
        drop_last=batches.drop_last,
        sampler=order,
        generator=loader.generator,
        **reading_options(loader),
    )


def reading_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a loader reads, whatever it reads: for another one over the same data set."""
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "persistent_workers": loader.persistent_workers,
    }
    if loader.num_workers > 0:
        options["prefetch_factor"] = loader.prefetch_factor
    return options
