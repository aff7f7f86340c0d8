"""The optimizer's state between servers, which hold it by pieces, and checkpoints, which hold it by parameters; and as
messages carry it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.errors import TrainingError
from drivetrain_plugins.parameter_server.packing import pack, unpack
from drivetrain_plugins.parameter_server.pieces import Piece, joined
from drivetrain_plugins.parameter_server.wire import Message, WireError


def entries(state: Mapping[str, Mapping[str, Any]], tensors: list[Tensor]) -> list[list[Any]]:
    """``state`` as plain data; its tensors are appended to ``tensors``."""
    found: list[list[Any]] = []
    for name, values in state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors.append(value)
            found.append([name, key, None if isinstance(value, Tensor) else [value]])
    return found


def packed(saved: Mapping[str, Any] | None, tensors: list[Tensor]) -> dict[str, Any]:
    """The fields of a message that :func:`unpacked` makes ``saved`` of again, which is None or a
    :func:`drivetrain.named_optimizer.named_state` by the server's keys; its tensors are appended to ``tensors``."""
    if saved is None:
        return {"saved": False}
    more = {key: value for key, value in saved.items() if key in _BESIDE}
    return {"saved": True, "entries": entries(saved["state"], tensors), "kept": pack(more, tensors)}


def unpacked(message: Message, rest: Sequence[Tensor], known: Collection[str]) -> dict[str, Any] | None:
    """What :func:`packed` was given.

    Args:
        rest: the message's tensors from the first entry's on.
        known: names that the states may be of.

    Raises:
        WireError: the message is none of these.
    """
    if not message.fields.get("saved"):
        return None
    state: dict[str, dict[str, Any]] = {}
    tensors = iter(rest)
    try:
        for name, key, value in message.fields["entries"]:
            state.setdefault(name, {})[key] = next(tensors) if value is None else value[0]
        more = unpack(message.fields["kept"], message.tensors)
        if not state.keys() <= set(known) or not more.keys() <= _BESIDE:
            raise ValueError(f"states of {[*state][:3]} beside {[*more][:3]}")
    except (TypeError, ValueError, LookupError, AttributeError, StopIteration) as error:
        raise WireError(f"a {message.kind} has no states of this server's parameters ({str(error)[:100]})") from error
    return {"state": state, **more}


_BESIDE = {"beside", "further", "whole"}


def whole(
    answers: Sequence[Message], held: Sequence[Mapping[str, Piece]], shapes: Mapping[str, torch.Size]
) -> dict[str, dict[str, Any]]:
    """The state by parameter, from every server's answer.

    Args:
        held: what each server holds, by its key.
        shapes: of the parameters.
    """
    found: dict[Piece, dict[str, Any]] = {}
    for pieces, answer in zip(held, answers, strict=True):
        tensors = iter(answer.tensors)
        for name, key, value in answer.fields["entries"]:
            found.setdefault(pieces[name], {})[key] = next(tensors) if value is None else value[0]
    return joined(found, shapes)


def kept_beside(answers: Sequence[Message], optimizer: Optimizer) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """``{"beside": ..., "further": ...}`` of :func:`drivetrain.named_optimizer.named_state`, as far as there are any,
    and of every group the settings that the optimizer changed itself.

    Raises:
        TrainingError: several servers have come to different ones. What counts steps is the same on all; what differs
            is of all parameters together, which no server has, and no checkpoint could say for another number of them.
    """
    found = [unpack(answer.fields["kept"], answer.tensors) for answer in answers]
    if not all(_same(found[0], one) for one in found[1:]):
        raise TrainingError(
            f"{type(optimizer).__name__} keeps something beside its parameters that differs from server to server, so"
            " that it cannot be saved as one: use strategy.servers=1 or strategy=ddp."
        )
    beside, further, groups = found[0]
    return {key: value for key, value in (("beside", beside), ("further", further)) if value}, groups


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def part(
    known: Mapping[str, Mapping[str, Any]], share: Mapping[str, Piece], shapes: Mapping[str, torch.Size]
) -> dict[str, dict[str, Any]]:
    """Of the state by parameter, what the server of ``share`` holds, by its keys."""
    return {
        key: piece.of_state(known[piece.name], shapes[piece.name])
        for key, piece in share.items()
        if piece.name in known
    }
