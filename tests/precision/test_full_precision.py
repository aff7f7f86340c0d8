"""32-true, 64-true, bf16-true: module, buffers, batches and new tensors in one format."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain import registry
from drivetrain.errors import ConfigurationError
from drivetrain_plugins.precision.full import DTYPES, FullPrecision


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)
        self.head.weight = self.body.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_module_and_batch_take_the_format(name: str) -> None:
    precision, net = registry.load("precisions", name)(name, None), Net()
    weight = net.body.weight
    weight.grad = torch.ones_like(weight)
    assert precision.convert_module(net) is net
    assert {p.dtype for p in net.parameters()} == {DTYPES[name]}
    assert net.norm.running_mean.dtype == DTYPES[name]
    assert net.norm.num_batches_tracked.dtype == torch.int64
    assert net.phase.dtype == torch.complex64
    assert net.head.weight is net.body.weight is weight
    assert weight.grad.dtype == DTYPES[name]
    batch = precision.convert_input({"x": [torch.ones(2, dtype=torch.float16)], "y": torch.arange(2), "id": "a"})
    assert batch["x"][0].dtype == DTYPES[name]
    assert batch["y"].dtype == torch.int64
    assert batch["id"] == "a"


def test_batch_that_fits_is_not_rebuilt() -> None:
    batch = (torch.ones(2), torch.arange(2))
    assert FullPrecision("32-true").convert_input(batch) is batch


def test_shared_buffers_stay_shared() -> None:
    net = nn.Module()
    net.register_buffer("a", torch.ones(2))
    net.register_buffer("b", net.a)
    FullPrecision("64-true").convert_module(net)
    assert net.a is net.b
    assert net.a.dtype == torch.float64


def test_default_dtype_is_restored_even_after_an_error() -> None:
    precision = FullPrecision("64-true")
    with precision.init_context(), precision.forward_context():
        assert nn.Linear(1, 1).weight.dtype == torch.float64
    with precision.forward_context():
        assert torch.rand(1).dtype == torch.float64
    with pytest.raises(ZeroDivisionError), precision.forward_context():
        _ = 1 / 0
    assert torch.get_default_dtype() == torch.float32


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"loss_scale=8\.0 out or use precision=16-mixed"):
        FullPrecision("bf16-true", 8.0)
    with pytest.raises(ConfigurationError, match="did you mean '64-true'"):
        FullPrecision("64true")
