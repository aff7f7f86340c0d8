"""Optimizer states by parameter name instead of by position, so that they move between ways of holding a model."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.errors import CheckpointError


def parameter_names(module: nn.Module) -> dict[int, str]:
    """``id(parameter)`` to its first name in ``module``."""
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    return names


def named_state(module: nn.Module, optimizer: Optimizer, names: dict[int, str] | None = None) -> dict[str, Any]:
    """``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``; tensors are shared, not copied.
    ``names`` where the optimizer's parameters are not those of ``module`` any more."""
    names = parameter_names(module) if names is None else names
    packed = optimizer.state_dict()
    order = [p for group in optimizer.param_groups for p in group["params"]]
    by_index = {i: names.get(id(p), f"#{i}") for i, p in enumerate(order)}
    return {
        "state": {by_index[index]: state for index, state in packed["state"].items()},
        "param_groups": [
            {**group, "params": [by_index[index] for index in group["params"]]} for group in packed["param_groups"]
        ],
    }


def load_named_state(module: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Restore :func:`named_state`; groups must match in number, parameters are found by name."""
    names = parameter_names(module)
    groups = optimizer.param_groups
    if len(groups) != len(saved["param_groups"]):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved['param_groups'])} parameter groups, this one has"
            f" {len(groups)}: configure the same groups or load the weights only."
        )
    index, state, packed_groups = 0, {}, []
    for group, saved_group in zip(groups, saved["param_groups"], strict=True):
        indices = []
        for parameter in group["params"]:
            name = names.get(id(parameter), f"#{index}")
            if name in saved["state"]:
                state[index] = saved["state"][name]
            indices.append(index)
            index += 1
        packed_groups.append({**saved_group, "params": indices})
    optimizer.load_state_dict({"state": state, "param_groups": packed_groups})
