"""Whether, and how long, something that gives batches is."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import IterableDataset

from drivetrain.rank_zero import rank_zero_warn


def has_iterable_dataset(dataloader: object) -> bool:
    """Whether it reads a stream."""
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def sized_len(dataloader: object) -> int | None:
    """Its length; None where it has none."""
    try:
        return len(dataloader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def has_len(dataloader: object) -> bool:
    """Whether it has a length; one that is nothing, or a guess, is told."""
    length = sized_len(dataloader)
    if length == 0:
        rank_zero_warn(f"the {type(dataloader).__name__} has no batch at all.")
    if length is not None:
        _tell_guess(dataloader)
    return length is not None


def has_len_all_ranks(
    dataloader: object, strategy: Any, allow_zero_length_dataloader_with_multiple_devices: bool = False
) -> bool:
    """Whether it has a length, and batches on this rank where it has any. A collective: every rank calls it.

    Raises:
        RuntimeError: others have batches and this rank has none, which is not allowed.
    """
    length = sized_len(dataloader)
    if length is None:
        return False
    total = int(strategy.reduce(torch.tensor(length, device=strategy.root_device), reduce_op="sum"))
    name = type(dataloader).__name__
    if total == 0:
        rank_zero_warn(f"the {name} has no batch at all, on any rank.")
    elif length == 0:
        if not allow_zero_length_dataloader_with_multiple_devices:
            raise RuntimeError(f"the {name} has no batch on this rank, but {total} on others: give it one.")
        rank_zero_warn(f"the {name} has no batch on this rank, but {total} on others.")
    _tell_guess(dataloader)
    return True


def _tell_guess(dataloader: object) -> None:
    if has_iterable_dataset(dataloader):
        rank_zero_warn(
            "the length of a stream is a guess where several worker processes read it, unless each reads its own part."
        )
