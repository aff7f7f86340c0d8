"""Parameters are divided evenly, large ones in pieces; what is stepped in pieces is what the whole would have been."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from drivetrain.optimizer import ELEMENTWISE
from drivetrain_plugins.parameter_server.pieces import Piece, cut, divide, joined
from drivetrain_plugins.parameter_server.share import share_of

SGD = torch.optim.SGD([torch.zeros(1)], lr=0.1)


class RowWise(torch.optim.SGD):
    """Of an elementwise class, but who knows."""


@settings(max_examples=40)
@given(st.dictionaries(st.text(max_size=4), st.integers(0, 10**6), min_size=1, max_size=30), st.integers(1, 5))
def test_parameters_are_divided_evenly(sizes: dict[str, int], servers: int) -> None:
    tensors = {name: torch.empty(size, device="meta") for name, size in sizes.items()}
    even = sum(sizes.values()) / servers
    for optimizer, most in ((SGD, even * 1.5 + 1), (RowWise([torch.zeros(1)]), 4 / 3 * max(even, *sizes.values()))):
        pieces = cut(tensors, servers, optimizer)
        shares = divide(pieces, tensors, servers)
        assert sorted(map(str, pieces)) == sorted(str(piece) for share in shares for piece in share)
        loads = [sum(piece.of(tensors[piece.name]).numel() for piece in share) for share in shares]
        assert sum(loads) == sum(sizes.values()) and max(loads) <= most


def test_what_is_cut() -> None:
    tensors = {"big": torch.zeros(40, 2), "strided": torch.zeros(2, 40).t(), "small": torch.zeros(4)}
    pieces = cut(tensors, 2, SGD)
    assert pieces == [Piece("big", 0, 40), Piece("big", 40, 80), Piece("strided"), Piece("small")]
    assert [piece.key for piece in pieces] == ["big[0:40]", "big[40:80]", "strided", "small"]
    for optimizer, servers in ((SGD, 1), (RowWise([torch.zeros(1)]), 2), (None, 2)):
        assert cut(tensors, servers, optimizer) == [Piece("big"), Piece("strided"), Piece("small")]


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_stepped_in_pieces_as_whole_and_loaded_again(kind: Any) -> None:
    """Three steps over two servers, the states put together and cut anew among three, two steps more."""
    torch.manual_seed(0)
    whole = {"a": nn.Parameter(torch.randn(30, 5).double()), "b": nn.Parameter(torch.randn(7).double())}
    optimizer: Optimizer = kind(whole.values())
    names = {id(p): name for name, p in whole.items()}
    shapes = {name: p.shape for name, p in whole.items()}
    states: dict[str, dict[str, Any]] | None = None
    for servers, steps in ((2, 3), (3, 2)):
        tensors = {name: p.detach() for name, p in whole.items()}
        shares = divide(cut(tensors, servers, optimizer), tensors, servers)
        parts = [(share, *share_of(optimizer, names, share)) for share in shares]
        for share, own, found in parts if states is not None else ():
            for piece in share:
                own.state[found[piece.key]] = copy.deepcopy(piece.of_state(states[piece.name], shapes[piece.name]))
        for _ in range(steps):
            for p in whole.values():
                p.grad = torch.randn_like(p)
            for share, own, found in parts:
                for piece in share:
                    gradient = whole[piece.name].grad
                    assert gradient is not None
                    found[piece.key].grad = piece.of(gradient).clone()
                own.step()
            optimizer.step()
        for share, _, found in parts:
            for piece in share:
                torch.testing.assert_close(found[piece.key], piece.of(whole[piece.name]), rtol=0, atol=1e-14)
        states = joined({piece: own.state[found[piece.key]] for share, own, found in parts for piece in share}, shapes)
        for name, p in whole.items():
            assert states[name].keys() == optimizer.state[p].keys()
            for key, value in optimizer.state[p].items():
                torch.testing.assert_close(states[name][key], value, rtol=0, atol=1e-14)
