"""Other loaders over the data set of a given one."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from drivetrain.stateful_loader import Stateful

_TORCHS = ("torch", "torchdata")


def in_order(loader: Any) -> Any:
    """A shuffled loader over its data set in order."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return loader
    if isinstance(loader.sampler, SequentialSampler):
        return loader
    return with_sampler(loader, SequentialSampler(cast(Any, loader.dataset)))


def dealt_to_one(loader: Any, seed: int, training: bool) -> Any:
    """``loader`` with the order of a ``DistributedSampler`` for one process: what Lightning reads by on one device of a
    distributed strategy. Training data is shuffled, whatever the loader says; other orders of its own (repeated
    draws, a project's sampler) are kept."""
    drawn = _drawn(loader)
    return loader if drawn is None or not (drawn or training) else dealt_to(loader, 1, 0, True, _seed(loader, seed))


def dealt_by_itself(loader: Any, seed: int, training: bool, ranks: int, rank: int) -> Any:
    """The same for one of several ranks of a loader that iterates in a way of its own (torchdata's), and so cannot be
    read by a sampler of ours. What is evaluated is each rank's once, and not filled up."""
    if _drawn(loader) is None or type(loader).__iter__ is DataLoader.__iter__:
        return loader
    if training:
        return dealt_to(loader, ranks, rank, True, _seed(loader, seed))
    return with_sampler(loader, cast(Any, range(rank, len(loader.dataset), ranks)))


def _drawn(loader: Any) -> bool | None:
    """Whether ``loader`` reads its data set shuffled; None where it reads it in neither order, once each."""
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if not _is_torchs(batches, BatchSampler):
        return None
    sampler = cast(Any, batches).sampler
    if _is_torchs(sampler, RandomSampler):
        once = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        return True if once else None
    return False if _is_torchs(sampler, SequentialSampler) else None


def _is_torchs(sampler: Any, kind: type) -> bool:
    """Whether it is torch's ``kind`` of sampler, or torchdata's, and not a project's."""
    found = type(sampler)
    return found.__name__ == kind.__name__ and found.__module__.partition(".")[0] in _TORCHS


def has_sampler_of_its_own(loader: Any) -> bool:
    """Whether what chooses the samples of ``loader`` is a class of the project's; not where it iterates in a way of its
    own, or says itself where it stands."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return False
    if isinstance(loader.dataset, IterableDataset) or isinstance(loader, Stateful):
        return False
    found = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    chosen = (found, getattr(found, "sampler", None))
    return any(one is not None and type(one).__module__.partition(".")[0] not in _TORCHS for one in chosen)


def read_by(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """A loader of the same class and attributes whose batches, or samples where it makes none, ``sampler`` chooses."""
    found = copy.copy(loader)
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    vars(found).update({name: sampler, "_iterator": None})  # as in ``with_sampler``
    return found


def _seed(loader: Any, seed: int) -> int:
    sampler = loader.batch_sampler.sampler
    # torchdata's samplers have always one, which may be another on each rank.
    own = sampler.generator if type(sampler) is RandomSampler else loader.generator
    return seed if own is None else own.initial_seed()


def is_dealt(loader: Any) -> bool:
    """Whether ``loader`` is one whose samples are dealt out: of a data set with a length, whole or once each in any
    order. One that has a ``DistributedSampler`` of the project's shows the rank's part already."""
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or type(batches) is not BatchSampler:
        return False
    sampler, samples = batches.sampler, len(cast(Any, loader.dataset))
    whole = type(sampler) is SequentialSampler
    return whole or (type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == samples)


def dealt_to(loader: DataLoader[Any], ranks: int, rank: int, shuffle: bool, seed: int) -> DataLoader[Any]:
    """``loader`` as a ``DistributedSampler`` deals its samples out to one rank: its length is the rank's, and the last
    round is filled up with the first samples."""
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, num_replicas=ranks, rank=rank, shuffle=shuffle, seed=seed
    )
    return with_sampler(loader, sampler)


def with_sampler(loader: DataLoader[Any], sampler: Sampler[Any]) -> DataLoader[Any]:
    """A loader of the same class and attributes that reads, in batches of the same size, what ``sampler`` says."""
    found = copy.copy(loader)
    given = loader.batch_sampler  # which knows its size also where it was given, and the loader does not
    like = given if isinstance(given, BatchSampler) else loader
    batches = BatchSampler(sampler, cast(int, like.batch_size), like.drop_last)
    # DataLoader refuses to have these set after its __init__, since an iterator may be there; a copy has none.
    vars(found).update(sampler=sampler, batch_sampler=batches, _iterator=None)
    return found


def reading(
    loader: DataLoader[Any], dataset: Any, batches: Iterable[Any], generator: torch.Generator
) -> DataLoader[Any]:
    """A loader of the same class and attributes that reads from ``dataset`` the lists of indices that ``batches``
    gives, and draws from ``generator``: a project's loader may say for itself how a list becomes a batch."""
    found = copy.copy(loader)
    vars(found).update(dataset=dataset, batch_sampler=batches, generator=generator, _iterator=None)  # see above
    return found


def with_last_batch(loader: Any) -> Any:
    """``loader`` without ``drop_last``: for what asks for each sample."""
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    if type(batches) is not BatchSampler or not batches.drop_last:
        return loader
    found = copy.copy(loader)
    batches = BatchSampler(batches.sampler, batches.batch_size, drop_last=False)
    vars(found).update(batch_sampler=batches, drop_last=False, _iterator=None)  # as in ``with_sampler``
    return found


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
