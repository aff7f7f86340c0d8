"""Whether weights are still those that a server sent: what a hook does to them elsewhere would be lost in silence."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_SMALL = 2**16  # elements
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """Two numbers of each tensor, int64, on its device: the sum of its bits taken as whole numbers, which any one
    change changes, and the bits of its own sum, which signs change. Small tensors count as one: a GPU takes as long to
    begin with a tensor as to go through it."""
    flats = _together([_flat(t) for t in tensors])
    bits = [_words(t).sum(dtype=torch.int64) for t in flats]
    sums = [t.sum().double().view(torch.int64) for t in flats]
    return torch.stack([*bits, *sums]) if flats else torch.empty(0, dtype=torch.int64)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the same dtype and shape on the CPU are equal, bit by bit where they are contiguous: the
    system compares memory in half the time that torch takes."""
    if not (one.is_contiguous() and other.is_contiguous()):
        return torch.equal(one, other)
    return one.nbytes == 0 or int(_memcmp(one.data_ptr(), other.data_ptr(), one.nbytes)) == 0


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def _together(flats: list[Tensor]) -> list[Tensor]:
    """The large ones, then the small ones of each dtype in one."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for flat in flats:
        if flat.numel() < _SMALL:
            small.setdefault(flat.dtype, []).append(flat)
    return [*(flat for flat in flats if flat.numel() >= _SMALL), *(torch.cat(group) for group in small.values())]


def _words(flat: Tensor) -> Tensor:
    """The same memory as integers of 8 bytes, or where that does not come out even, of the elements' own size."""
    size = flat.element_size()
    if flat.nbytes % 8 == 0 and flat.storage_offset() * size % 8 == 0:
        return flat.view(torch.int64)
    return flat.view(_INTEGERS[size])
