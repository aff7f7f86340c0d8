"""Which server holds what: whole parameters, and large ones cut into pieces, of which each server gets its part.

A piece is some consecutive elements of a parameter. Optimizers that treat every element by itself step pieces exactly
as they step the whole; others (which look at rows, norms or shapes) get whole parameters only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.optimizer import ELEMENTWISE


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of the parameter ``name``; ``stop`` None: the whole parameter, in its shape."""

    name: str
    start: int = 0
    stop: int | None = None

    @property
    def key(self) -> str:
        """What it is called in messages."""
        return self.name if self.stop is None else f"{self.name}[{self.start}:{self.stop}]"

    def of(self, tensor: Tensor) -> Tensor:
        """This part of ``tensor``, which has the parameter's size; the same memory where that is contiguous."""
        return tensor if self.stop is None else tensor.reshape(-1)[self.start : self.stop]

    def of_state(self, state: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
        """This part of an optimizer's state of a parameter of ``shape``; counters and the like are for every piece."""
        return {
            key: self.of(value) if isinstance(value, Tensor) and value.shape == shape else value
            for key, value in state.items()
        }


def cut(tensors: Mapping[str, Tensor], servers: int, optimizer: Optimizer | None) -> list[Piece]:
    """The pieces of all parameters: none of more than half a server's even share, where ``optimizer`` allows it."""
    if servers == 1 or type(optimizer) not in ELEMENTWISE:
        return [Piece(name) for name in tensors]
    most = max(1, sum(t.numel() for t in tensors.values()) // (2 * servers))
    pieces: list[Piece] = []
    for name, tensor in tensors.items():
        size = tensor.numel()
        if size <= most or not tensor.is_contiguous():
            pieces.append(Piece(name))
            continue
        number = -(-size // most)
        ends = [size * i // number for i in range(number + 1)]
        pieces += [Piece(name, start, stop) for start, stop in pairwise(ends)]
    return pieces


def divide(pieces: Sequence[Piece], tensors: Mapping[str, Tensor], servers: int) -> list[list[Piece]]:
    """The pieces of each server: the largest first, each to the server that has least (Graham, 1969: no server gets
    more than 4/3 of what is unavoidable). The same on every rank."""
    shares: list[list[Piece]] = [[] for _ in range(servers)]
    load = [0] * servers
    sizes = {piece: piece.of(tensors[piece.name]).numel() for piece in pieces}
    for piece in sorted(pieces, key=lambda piece: (-sizes[piece], piece.name, piece.start)):
        least = load.index(min(load))
        shares[least].append(piece)
        load[least] += sizes[piece]
    return shares


def joined(states: Mapping[Piece, Mapping[str, Any]], shapes: Mapping[str, torch.Size]) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter, from that of all pieces."""
    by_name: dict[str, list[Piece]] = {}
    for piece in sorted(states, key=lambda piece: piece.start):
        by_name.setdefault(piece.name, []).append(piece)
    return {name: _joined(found, states, shapes[name]) for name, found in by_name.items()}


def _joined(pieces: list[Piece], states: Mapping[Piece, Mapping[str, Any]], shape: torch.Size) -> dict[str, Any]:
    first = states[pieces[0]]
    if pieces[0].stop is None:
        return dict(first)
    result: dict[str, Any] = {}
    for key, value in first.items():
        length = (pieces[0].stop - pieces[0].start,)
        spread = isinstance(value, Tensor) and tuple(value.shape) == length
        result[key] = torch.cat([states[piece][key] for piece in pieces]).view(shape) if spread else value
    return result
