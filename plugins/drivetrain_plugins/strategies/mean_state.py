"""The optimizer state of replicas that each have their own, as one that every rank holds alike."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain_plugins.strategies.averaging import Averaging, has_mean


def mean_state(states: list[dict[str, Any]], averaging: Averaging) -> list[dict[str, Any]]:
    """The mean over the ranks of :func:`drivetrain.named_optimizer.named_state` of each optimizer.

    Real and complex tensors (momenta, second moments, step counts) are averaged over the ranks that have them: a
    replica that skipped its first steps has none yet. Other tensors are those of the first rank that has them; plain
    values and the parameter groups are this rank's. Every rank calls it at the same point.
    """
    communicator = averaging.communicator
    if communicator.world_size == 1:
        return states
    mine = {
        (number, name, key): value
        for number, state in enumerate(states)
        for name, entries in state["state"].items()
        for key, value in entries.items()
        if isinstance(value, torch.Tensor)
    }
    layout = [[*place, list(t.shape), str(t.dtype).removeprefix("torch.")] for place, t in mine.items()]
    holders: dict[tuple[int, str, str], list[int]] = {}
    shapes: dict[tuple[int, str, str], tuple[list[int], str]] = {}
    for rank, listed in enumerate(communicator.all_gather_plain(layout)):
        for number, name, key, shape, dtype in listed:
            holders.setdefault((number, name, key), []).append(rank)
            shapes.setdefault((number, name, key), (shape, dtype))
    result = [{**state, "state": {name: dict(entries) for name, entries in state["state"].items()}} for state in states]
    averaged: list[tuple[torch.Tensor, int]] = []
    for place, ranks in holders.items():
        shape, dtype = shapes[place]
        own = mine.get(place)
        kind = getattr(torch, dtype)
        tensor = torch.zeros(shape, dtype=kind, device=communicator.device) if own is None else own.detach().clone()
        if has_mean(tensor):
            averaged.append((tensor, len(ranks)))
        else:
            tensor = communicator.broadcast(tensor.to(communicator.device), ranks[0]).to(tensor.device)
        number, name, key = place
        result[number]["state"].setdefault(name, {})[key] = tensor
    averaging.sum([tensor for tensor, _ in averaged], counts=False)
    for tensor, count in averaged:
        tensor.div_(count)
    return result
