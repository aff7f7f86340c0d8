"""Bringing together what ranks hold in part: every rank ends with every tensor, by name.

What there is travels as JSON, the numbers as flat tensors of one dtype each; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.comm.communicator import Communicator
from drivetrain.comm.synchronize import broadcast_tensors


def gather_states(communicator: Communicator, states: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The union of all ranks' optimizer ``states`` (parameter name to ``{key: tensor or plain value}``, or dictionaries
    and lists of these) on every rank.

    A rank's own entries stay the tensors they are; others' come on the CPU. Where two ranks hold a name (tied weights)
    they hold the same, and the first is taken.
    """
    own: list[Tensor] = []
    mine = [[name, key, _told(value, own)] for name, state in states.items() for key, value in state.items()]
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in own]
    result: dict[str, dict[str, Any]] = {}
    for rank, (listed, theirs) in enumerate(communicator.all_gather_plain([mine, kinds])):
        found = own
        if rank != communicator.rank:
            found = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in theirs]
        broadcast_tensors(communicator, {str(number): tensor for number, tensor in enumerate(found)}, rank)
        for name, key, told in listed:
            result.setdefault(name, {}).setdefault(key, _heard(told, found))
    return result


def _told(value: Any, tensors: list[Tensor]) -> Any:
    """``value`` as JSON can say it; its tensors are appended to ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if isinstance(value, Mapping):
        return ["dict", [[key, _told(one, tensors)] for key, one in value.items()]]
    if isinstance(value, list | tuple):
        return ["tuple" if isinstance(value, tuple) else "list", [_told(one, tensors) for one in value]]
    return ["plain", value]


def _heard(told: Any, tensors: Sequence[Tensor]) -> Any:
    kind, content = told
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _heard(one, tensors) for key, one in content}
    if kind == "plain":
        return content
    items = [_heard(one, tensors) for one in content]
    return tuple(items) if kind == "tuple" else items
