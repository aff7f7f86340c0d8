"""Other loaders over the data set of a given one."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler


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
