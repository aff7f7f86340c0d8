"""Bringing together what ranks hold in part: every rank ends with every tensor, by name.

What there is travels as JSON, the numbers as flat tensors of one dtype each; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drivetrain.comm.communicator import Communicator

_CHUNK = 2**26  # elements of a message at most, unless one tensor has more


def spread(communicator: Communicator, tensors: Mapping[str, Tensor], source: int) -> None:
    """Overwrite ``tensors``, of the same names, shapes and dtypes on all ranks, with those of ``source``."""
    for group in _groups(tensors):
        flat = torch.empty(sum(t.numel() for t in group), dtype=group[0].dtype, device=communicator.device)
        if communicator.rank == source:
            torch.cat([t.detach().reshape(-1).to(flat.device) for t in group], out=flat)
        communicator.broadcast(flat, source)
        if communicator.rank != source:
            offset = 0
            with torch.no_grad():
                for tensor in group:
                    tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
                    offset += tensor.numel()


def _groups(tensors: Mapping[str, Tensor]) -> list[list[Tensor]]:
    """Tensors of one dtype, in the order of their names, in portions."""
    portions: dict[torch.dtype, list[list[Tensor]]] = {}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        if tensor.numel() == 0:
            continue
        known = portions.setdefault(tensor.dtype, [[]])
        if known[-1] and sum(t.numel() for t in known[-1]) + tensor.numel() > _CHUNK:
            known.append([])
        known[-1].append(tensor)
    return [group for dtype in sorted(portions, key=str) for group in portions[dtype] if group]


def gather_states(communicator: Communicator, states: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The union of all ranks' optimizer ``states`` (parameter name to ``{key: tensor or plain value}``) on every rank.

    A rank's own entries stay the tensors they are; others' come on the CPU. Where two ranks hold a name (tied weights)
    they hold the same, and the first is taken.
    """
    mine = [
        [name, key, [str(value.dtype).removeprefix("torch."), list(value.shape)] if isinstance(value, Tensor) else None]
        + ([] if isinstance(value, Tensor) else [value])
        for name, state in states.items()
        for key, value in state.items()
    ]
    result: dict[str, dict[str, Any]] = {}
    for rank, listed in enumerate(communicator.all_gather_plain(mine)):
        found: dict[str, Tensor] = {}
        own = rank == communicator.rank
        for name, key, kind, *plain in listed:
            place = result.setdefault(name, {})
            if kind is None:
                place.setdefault(key, plain[0])
                continue
            value = states[name][key] if own else torch.empty(kind[1], dtype=getattr(torch, kind[0]))
            found[f"{name}\n{key}"] = value
            place.setdefault(key, value)
        spread(communicator, found, rank)
    return result
