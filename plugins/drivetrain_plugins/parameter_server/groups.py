"""The settings of parameter groups: the learning rate of now and what else a schedule may change travel to the servers,
whose optimizers must step as the workers' would."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain_plugins.parameter_server.wire import WireError


def plain_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of every group that JSON can hold."""
    return [
        {key: _plain(value) for key, value in group.items() if key != "params" and _is_plain(_plain(value))}
        for group in optimizer.param_groups
    ]


def check_groups(groups: Any, optimizer: Optimizer, told: list[dict[str, Any]] | None = None) -> None:
    """Raise :class:`WireError` unless ``groups`` are settings that ``optimizer`` can step with; ``told`` are the last
    that were let through."""
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        raise WireError("a message does not have this optimizer's parameter groups")
    for number, (group, values) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        if not isinstance(values, dict):
            raise WireError("a parameter group of a message has no settings")
        for key, value in _news(values, told[number] if told else {}).items():
            if key in group and not _alike(value, group[key]):
                raise WireError(f"a message sets {key[:40]!r} of a parameter group to what it cannot be")


def set_groups(groups: list[dict[str, Any]], optimizer: Optimizer, told: list[dict[str, Any]] | None = None) -> None:
    """Give ``optimizer`` the settings that :func:`check_groups` has let through, but for those that are as ``told``
    last: what an optimizer counts in its own groups (schedule-free ones do) would else begin anew at every step."""
    for number, (group, values) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for key, value in _news(values, told[number] if told else {}).items():
            if key != "params":
                group[key] = as_before(value, group.get(key))


def own_settings(optimizer: Optimizer, told: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Of every group the settings that ``optimizer`` changed itself since it was ``told`` them."""
    groups = plain_groups(optimizer)
    return [_news(group, former) for group, former in zip(groups, told, strict=True)] if told else [{} for _ in groups]


def as_before(value: Any, former: Any) -> Any:
    """A setting out of a message in the type that it had: JSON knows no tuples (Adam's betas), and no tensors."""
    if isinstance(former, Tensor) and isinstance(value, (int, float)):
        return torch.full_like(former, value)
    return tuple(value) if isinstance(former, tuple) else value


def _news(values: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in told or told[key] != value}


def _alike(value: Any, former: Any) -> bool:
    """Whether ``value`` may take the place of ``former``."""
    if former is None:
        return value is None or isinstance(value, (bool, int, float, str))
    if isinstance(former, (list, tuple)):
        return (
            isinstance(value, list)
            and len(value) == len(former)
            and all(_alike(one, other) for one, other in zip(value, former, strict=True))
        )
    if isinstance(former, bool):
        return isinstance(value, bool)
    if isinstance(former, (int, float, Tensor)):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, type(former))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value
    return list(value) if isinstance(value, tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
