"""What torchmetrics metrics of a module gather on each rank: brought together over ranks, kept for a checkpoint.

torchmetrics by itself gathers over the whole job: also from ranks that only serve, twice where ranks see the same
samples, and from tensors of the same shape and dtype only, which a rank without a batch does not have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import reduce
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.comm.communicator import Communicator

if TYPE_CHECKING:
    from drivetrain.strategy import Strategy


def metrics_of(module: nn.Module) -> dict[str, Any]:
    """The module's torchmetrics metrics by name; none where torchmetrics is not even imported."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return {}
    return {name: child for name, child in module.named_modules() if isinstance(child, torchmetrics.Metric)}


class Gathering:
    """Gathers one tensor of a metric's state, as torchmetrics calls its ``dist_sync_fn``.

    Args:
        communicator: the ranks that evaluate together.
        counts: whether what this rank gathered counts (not where another rank sees the same samples, or all of them).
        come_together: called before, with what is about to be done; refuses it where other ranks do not come to it.
    """

    def __init__(
        self, communicator: Communicator, counts: bool, come_together: Callable[[str], None] | None = None
    ) -> None:
        self.communicator, self.counts, self.come_together = communicator, counts, come_together

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """The ``state`` of each rank that counts, in one dtype; without the empty ones where there are others."""
        if self.come_together is not None:
            self.come_together("compute() of a metric")
        said = self.communicator.all_gather_plain([list(state.shape), _name(state.dtype), self.counts])
        counting = [(shape, dtype) for shape, dtype, counts in said if counts]
        filled = [one for one in counting if prod(one[0])] or counting
        common = reduce(torch.promote_types, (getattr(torch, dtype) for _, dtype in filled))
        sizes = [prod(shape) for shape, _, _ in said]
        flat = self.communicator.all_gather(state.detach().to(common).reshape(-1), sizes=sizes)
        whole = [part.view(shape) for part, (shape, _, _) in zip(flat, said, strict=True)]
        if state.dtype == common:
            whole[self.communicator.rank] = state  # with its graph
        parts = [part for part, (_, _, counts) in zip(whole, said, strict=True) if counts]
        return [part for part in parts if part.numel()] or parts

    def __deepcopy__(self, memo: dict[int, Any]) -> Gathering:
        return self  # a copy of the metric is one of this run, whose communicator cannot be copied

    def __reduce__(self) -> Any:
        return type(None), ()  # whoever reads a pickled metric is in no run


def gather_over(module: nn.Module, strategy: Strategy) -> None:
    """From now on the metrics of ``module`` gather over the ranks that ``strategy`` trains with, but for those that the
    project told how. A job of a single process gathers nothing."""
    gathering: Gathering | None = None
    if strategy.job.world_size > 1:
        gathering = Gathering(strategy.communicator, strategy.predicts, strategy.come_together)
    for metric in metrics_of(module).values():
        own = metric.dist_sync_fn is not None and not isinstance(metric.dist_sync_fn, Gathering)
        if not own and metric.process_group is None:
            metric.dist_sync_fn = gathering


def states(module: nn.Module) -> dict[str, Any]:
    """What this rank's metrics have gathered of the epoch; not among the weights unless persistent."""
    return {
        name: {
            "updates": metric._update_count,
            "state": {key: list(v) if isinstance(v, list) else v.clone() for key, v in metric.metric_state.items()},
        }
        for name, metric in metrics_of(module).items()
    }


def brought_together(module: nn.Module, parts: list[dict[str, Any]], first: bool) -> tuple[dict[str, Any], set[str]]:
    """What metrics that gathered on several ranks, each ``parts`` of what :func:`states` gave, start from where other
    ranks go on, and the names of those for which there is no such thing.

    As a metric's states are reduced over ranks, so are they here, and stand on the ``first`` rank: the others add to
    them from their beginning. A state that is gathered by a function of the metric's own, or kept apart, belongs to the
    ranks that it is of; so does one that is averaged, as it does not say how much each of them has seen.
    """
    found: dict[str, Any] = {}
    lost: set[str] = set()
    for name, metric in metrics_of(module).items():
        of_ranks = [part[name] for part in parts if name in part and part[name]["updates"]]
        if not of_ranks:
            continue
        kinds = {key: _reduction(metric, key) for key in metric.metric_state}
        if None in kinds.values() or any(one["state"].keys() != kinds.keys() for one in of_ranks):
            lost.add(name)
            continue
        if first:
            state = {
                key: _reduced(kind, [one["state"][key] for one in of_ranks], metric._defaults[key])
                for key, kind in kinds.items()
            }
            found[name] = {"updates": sum(one["updates"] for one in of_ranks), "state": state}
    return found, lost


def _reduction(metric: Any, key: str) -> str | None:
    """How the state ``key`` is reduced over ranks, where that is one of torchmetrics' own ways and says of which parts
    the whole is."""
    data, reduction = sys.modules["torchmetrics.utilities.data"], metric._reductions[key]
    if isinstance(metric._defaults[key], list):
        return "cat" if reduction is data.dim_zero_cat else None
    return next((kind for kind in ("sum", "max", "min") if reduction is getattr(data, f"dim_zero_{kind}")), None)


def _reduced(kind: str | None, parts: list[Any], default: Any) -> Any:
    if kind == "cat":
        return [tensor for part in parts for tensor in (part if isinstance(part, list) else [part])]
    stacked = torch.stack(parts)
    if kind == "sum":  # each rank added to the default, which counts once for each of those that go on
        beginning = default.to(stacked.device, stacked.dtype)
        return (stacked - beginning).sum(0).to(stacked.dtype) + beginning
    return stacked.amax(0) if kind == "max" else stacked.amin(0)


def load(module: nn.Module, saved: dict[str, Any]) -> None:
    """Take up what :func:`states` gave."""
    for name, metric in metrics_of(module).items():
        if name in saved:
            for key, value in saved[name]["state"].items():
                moved = [v.to(metric.device) for v in value] if isinstance(value, list) else value.to(metric.device)
                setattr(metric, key, moved)
            metric._update_count = saved[name]["updates"]
            metric._computed = None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
