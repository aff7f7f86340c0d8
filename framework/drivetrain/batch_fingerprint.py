"""A number by which ranks compare what they read, once in a run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves


def fingerprint(batch: Any) -> float:
    """A number that different batches, or lists of samples, hardly share: of their tensors', arrays' and numbers'
    values and places."""
    total = 0.0
    for number, leaf in enumerate(tree_leaves(batch), 1):
        for tensor in _strided(leaf):
            if tensor.numel() and not tensor.is_complex():
                flat = tensor.detach().reshape(-1).double()
                places = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device)
                total += number * float((flat * places).sum())
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


def _strided(leaf: Any) -> Sequence[torch.Tensor]:
    """The ordinary tensors that ``leaf`` is made of: of a sparse one the indices and the values."""
    if isinstance(leaf, bool | int | float | np.number):
        return [torch.tensor(float(leaf), dtype=torch.float64)]
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
        return [torch.from_numpy(leaf.astype(np.float64))]
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
