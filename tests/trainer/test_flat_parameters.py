"""A module's parameters as one tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain import get_parameters, set_parameters
from drivetrain.errors import ConfigurationError


def test_parameters_survive_the_way_there_and_back() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    module[2].to(torch.bfloat16)
    held = module[0].weight
    flat = get_parameters(module)
    assert flat.shape == (sum(p.numel() for p in module.parameters()),)
    assert flat.dtype == torch.float32 and not flat.requires_grad
    kept = {name: p.detach().clone() for name, p in module.named_parameters()}
    set_parameters(module, torch.zeros_like(flat))
    assert all(not p.any() for p in module.parameters())
    assert module[0].weight is held
    set_parameters(module, flat)
    assert all(torch.equal(p, kept[name]) for name, p in module.named_parameters())
    flat.zero_()  # a copy, not a view
    assert all(torch.equal(p, kept[name]) for name, p in module.named_parameters())


def test_tied_parameters_come_once_and_an_empty_module_has_none() -> None:
    module = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    module[1].weight = module[0].weight
    assert get_parameters(module).numel() == 4
    empty = get_parameters(nn.Tanh())
    assert empty.shape == (0,)
    set_parameters(nn.Tanh(), empty)


@pytest.mark.parametrize("flat", [torch.zeros(7), torch.zeros(2, 4), torch.zeros(8, dtype=torch.float64)])
def test_what_does_not_fit_is_refused_and_changes_nothing(flat: torch.Tensor) -> None:
    module = nn.Linear(3, 2)
    before = get_parameters(module)
    with pytest.raises(ConfigurationError, match=r"Linear are a tensor of shape \(8,\) and torch.float32"):
        set_parameters(module, flat)
    assert torch.equal(before, get_parameters(module))
