"""The optimizer's state between servers, which hold it by pieces, and checkpoints, which hold it by parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from drivetrain_plugins.parameter_server.pieces import Piece, joined
from drivetrain_plugins.parameter_server.wire import Message


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


def part(
    known: Mapping[str, Mapping[str, Any]], share: Mapping[str, Piece], shapes: Mapping[str, torch.Size]
) -> dict[str, dict[str, Any]]:
    """Of the state by parameter, what the server of ``share`` holds, by its keys."""
    return {
        key: piece.of_state(known[piece.name], shapes[piece.name])
        for key, piece in share.items()
        if piece.name in known
    }
