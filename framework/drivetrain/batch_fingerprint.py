"""A number by which ranks compare what they read, once in a run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

# Elements that are summed at once: a batch may be large, and what it is summed by is eight bytes an element.
_AT_ONCE = 2**18
# Whole numbers are compared by what they leave here, which fp64 has exactly: neighbours among large ones differ.
_MODULUS = 2**40 - 87


def fingerprint(batch: Any) -> float:
    """A number that different batches, or lists of samples, hardly share: of their tensors', arrays' and numbers'
    values and places."""
    total, numbers = 0.0, []
    for number, leaf in enumerate(tree_leaves(batch), 1):
        plain = _plain(leaf)
        if plain is not None:  # lists of tokens have many
            numbers.append(number * plain)
            continue
        for tensor in _strided(leaf):
            total += number * _of_values(tensor)
    total += sum(numbers)
    return total if math.isfinite(total) else 0.0


def tell_of_unlike(marks: Collection[float], use: str) -> None:
    """Warn where ranks that keep their parts of one stream's batches read different streams.

    Args:
        marks: of each rank, the fingerprint of the first batch as it came; 0 where that is not known.
        use: what the ranks do with it.
    """
    if len(set(marks)) > 1 and 0.0 not in marks:
        warnings.warn(
            f"the ranks read different streams, and each {use} a part of its own: with batch=global every rank must"
            " read the same one. A data set that gives each rank its part, or draws other random numbers on each, needs"
            " batch=per_process.",
            stacklevel=3,
        )


def tell_of_alike(marks: Collection[float], by_sampler: bool) -> None:
    """Warn where ranks that train on batches of their own have the same.

    Args:
        marks: of each rank, the fingerprint of the first batch, or of the samples that a sampler chose for it, as what
            becomes of a sample may be drawn anew on each rank; 0 where that is not known.
        by_sampler: whether it is a sampler's choice.
    """
    if len(set(marks)) > 1 or 0.0 in marks:
        return
    if by_sampler:
        warnings.warn(
            "every rank draws the same samples and trains on the same batches: a sampler of the project's own draws the"
            " same random numbers on all ranks. Let it give each rank its part (torch.distributed.get_rank()), or set"
            " Trainer(use_distributed_sampler=True), which deals out what it gives.",
            stacklevel=3,
        )
        return
    warnings.warn(
        "every rank reads the same stream and trains on the same batches: let the data set's __iter__ give each rank"
        " its part (torch.distributed.get_rank()), or set Trainer(batch='global'), which splits each batch among the"
        " ranks.",
        stacklevel=3,
    )


def _plain(leaf: Any) -> float | None:
    """The value of a number, None of anything else."""
    if isinstance(leaf, float | np.floating):
        return float(leaf)
    if isinstance(leaf, int | np.integer | np.bool_) and not isinstance(leaf, np.timedelta64):
        return float(int(leaf) % _MODULUS)
    if isinstance(leaf, complex | np.complexfloating):
        return float(leaf.real) + 2.0 * float(leaf.imag)
    return None


def _of_values(tensor: torch.Tensor) -> float:
    """Of an ordinary tensor; nothing of one that has no values."""
    if tensor.numel() == 0 or tensor.is_meta:
        return 0.0
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    elif flat.dtype.itemsize == 1 and flat.dtype not in (torch.bool, torch.int8):
        flat = flat.view(torch.uint8)  # types of eight bits and less, of which some have no arithmetic
    kind = torch.float64 if flat.dtype.is_floating_point else torch.int64
    total, begun = 0.0, 1
    for piece in flat.reshape(-1).split(_AT_ONCE):
        places = torch.arange(begun, begun + len(piece), dtype=kind, device=piece.device)
        found = (piece.to(kind) * places).sum()
        total += float(found if kind is torch.float64 else found % _MODULUS)
        begun += len(piece)
    return total


def _strided(leaf: Any) -> Sequence[torch.Tensor]:
    """The ordinary tensors that ``leaf`` is made of: of a sparse one the indices and the values."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        kind = {"f": np.float64, "c": np.complex128}.get(leaf.dtype.kind, np.int64)
        return [torch.from_numpy(leaf.astype(kind))]
    if not isinstance(leaf, torch.Tensor):
        return []
    if leaf.is_nested:
        return leaf.unbind()
    if leaf.is_quantized:
        return [leaf.int_repr()]
    if leaf.is_mkldnn:
        return [leaf.to_dense()]
    if leaf.layout is torch.sparse_coo:
        return [leaf._indices(), leaf._values()]
    if leaf.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [leaf.crow_indices(), leaf.col_indices(), leaf.values()]
    if leaf.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [leaf.ccol_indices(), leaf.row_indices(), leaf.values()]
    return [leaf]
