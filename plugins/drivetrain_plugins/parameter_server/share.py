"""The user's optimizer, for a server that holds a share of the parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_plugins.parameter_server.pieces import Piece


def share_of(
    optimizer: Optimizer, names: Mapping[int, str], share: Iterable[Piece], tensors: Mapping[str, Tensor] | None = None
) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    """A copy of ``optimizer`` that steps copies of the pieces in ``share`` only, and these copies by the pieces' keys.

    Args:
        names: ``id(parameter)`` to its name.
        tensors: parameters by name; those of ``share`` that no optimizer steps are then found too, as they are.
    """
    share, own = list(share), _copy(optimizer)
    mine: dict[str, list[Piece]] = {}
    for piece in share:
        mine.setdefault(piece.name, []).append(piece)
    found: dict[str, nn.Parameter] = {}
    for group, original in zip(own.param_groups, optimizer.param_groups, strict=True):
        kept: list[nn.Parameter] = []
        for p, q in zip(original["params"], group["params"], strict=True):
            state = own.state.pop(q, None)  # some optimizers have one before the first step
            for piece in mine.get(names[id(p)], ()):
                part = q if piece.stop is None else nn.Parameter(piece.of(q.detach()).clone(), q.requires_grad)
                if state is not None:
                    own.state[part] = copy.deepcopy(piece.of_state(state, q.shape))
                found[piece.key] = part
                kept.append(part)
        group["params"] = kept
    if tensors is not None:
        for piece in (piece for piece in share if piece.key not in found):
            found[piece.key] = nn.Parameter(piece.of(tensors[piece.name]).clone(), requires_grad=False)
    return own, found


def _copy(optimizer: Optimizer) -> Optimizer:
    """Keeps what the optimizer's class holds beside groups and states, which its pickled form does not; without
    ``step``, which schedules replace by one that calls the original's."""
    own: Optimizer = object.__new__(type(optimizer))
    own.__dict__.update(copy.deepcopy({key: value for key, value in vars(optimizer).items() if key != "step"}))
    return own
