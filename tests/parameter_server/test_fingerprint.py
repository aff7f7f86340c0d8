"""A changed weight is noticed, however it was changed; the same weights are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drivetrain_plugins.parameter_server.fingerprint import fingerprint, same


def made(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    values = torch.randn(7, 5, generator=torch.Generator().manual_seed(2))
    every = [values, values[0, 0], values[:, 1:3], values[1], torch.empty(0, 3)]  # odd sizes, offsets and strides
    return [value.to(dtype) for value in every]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_equal_weights_are_equal(dtype: torch.dtype) -> None:
    assert torch.equal(fingerprint(made(dtype)), fingerprint([t.clone() for t in made(dtype)]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.data.clamp_(-1.0, 1.0),
        lambda t: t.neg_(),
        lambda t: t.view(-1)[3].mul_(1.01),
        lambda t: t.view(-1)[4].copy_(float("nan")),
        lambda t: t[:2].neg_(),
    ],
)
def test_a_change_is_noticed(dtype: torch.dtype, change: Callable[[Tensor], object]) -> None:
    tensors = [t.clone() for t in made(dtype)]
    before = fingerprint(tensors)
    change(tensors[0])
    assert not torch.equal(before, fingerprint(tensors))


def test_what_is_not_a_number_equals_itself() -> None:
    broken = [torch.tensor([float("nan"), 1.0])]
    assert torch.equal(fingerprint(broken), fingerprint(broken))


def test_nothing() -> None:
    assert torch.equal(fingerprint([]), fingerprint([]))


@pytest.mark.parametrize("where", [0, 70_000])
def test_a_change_is_noticed_in_large_and_small_tensors(where: int) -> None:
    tensors = [torch.zeros(3), torch.zeros(2**16 + where), torch.zeros(5, dtype=torch.float64)]
    before = fingerprint(tensors)
    for tensor in tensors:
        tensor.data.view(-1)[-1] += 1e-30
        after = fingerprint(tensors)
        assert not torch.equal(before, after)
        before = after


def test_memory_is_compared_by_its_bits() -> None:
    one = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    other = one.clone()
    assert same(one, other)
    assert same(one[:0], other[:0])
    assert same(one[1:].t(), other[1:].t())
    other[1, 1] = 4.0
    assert not same(one, other)
    assert not same(one.t()[1:], other.t()[1:])  # strided: one element after the other
