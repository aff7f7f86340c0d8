"""One number that tells whether two sets of weights are the same, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch


def weights_digest(state_dict: Mapping[str, Any]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of every floating-point (or complex) tensor, in the order of names.

    The device, the memory layout and the sharding of a tensor do not count; counters and other integers do not either.
    With DTensors in it the call is a collective: all ranks of their mesh must make it. Values that are no tensors are
    skipped. Returns 64 hexadecimal digits.
    """
    from torch.distributed.tensor import DTensor

    digest = hashlib.sha256()
    for name in sorted(state_dict):
        value = state_dict[name]
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        full = value.detach()
        if isinstance(full, DTensor):
            full = full.full_tensor()
        full = full.cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(f"{name}\0{full.dtype}\0{tuple(full.shape)}\0".encode())
        digest.update(full.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
