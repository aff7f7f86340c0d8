"""The user's optimizer, for a server that holds a share of the parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import Optimizer


def share_of(
    optimizer: Optimizer, names: Mapping[int, str], share: Iterable[str]
) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    """A copy of ``optimizer`` that steps copies of the parameters in ``share`` only, and these copies by name.

    Args:
        names: ``id(parameter)`` to its name.
    """
    own, mine = _copy(optimizer), set(share)
    found: dict[str, nn.Parameter] = {}
    for group, original in zip(own.param_groups, optimizer.param_groups, strict=True):
        pairs = [(names[id(p)], q) for p, q in zip(original["params"], group["params"], strict=True)]
        found |= {name: q for name, q in pairs if name in mine}
        group["params"] = [q for name, q in pairs if name in mine]
    return own, found


def _copy(optimizer: Optimizer) -> Optimizer:
    """Keeps what the optimizer's class holds beside groups and states, which its pickled form does not; without
    ``step``, which schedules replace by one that calls the original's."""
    own: Optimizer = object.__new__(type(optimizer))
    own.__dict__.update(copy.deepcopy({key: value for key, value in vars(optimizer).items() if key != "step"}))
    return own
