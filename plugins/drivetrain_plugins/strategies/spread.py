"""Bringing together what ranks hold in part: every rank ends with every tensor, by name.

What there is travels as JSON, the numbers as flat tensors of one dtype each; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drivetrain.comm.communicator import Communicator
from drivetrain.comm.synchronize import broadcast_tensors


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
        broadcast_tensors(communicator, found, rank)
    return result
