"""Bringing the gradients of several workers together: the three rules that the field names.

With g_i the gradients of worker i of n, w_i its weight and s_i its staleness (updates that the weights have had since
the worker read them):

- ``synchronous``: g = sum_i w_i g_i / sum_i w_i, the gradient of the whole batch where w_i counts samples.
- ``asynchronous``: g = sum_i w_i d(s_i) g_i / sum_i w_i with d(s) = 1 / (1 + s)^p. What is late counts less and nothing
  makes up for it, so a step of late gradients is a smaller step. p = 1 is the rule of Zhang, Gupta, Lian and Liu,
  "Staleness-aware Async-SGD" (IJCAI 2016), with staleness counted from 0; p = 0 is plain asynchronous SGD.
- ``elastic``: for worker r, g = a g_r + (1 - a) sum_i w_i g_i / sum_i w_i: its own gradient mixed with that of all, as
  ``strategy=elastic_averaging strategy.mix=gradients`` steps. a = 0 is ``synchronous``, a = 1 stays alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from drivetrain.comm.arguments import is_whole, number, require_name
from drivetrain.comm.communicator import CommunicationError, Communicator
from drivetrain.errors import ConfigurationError

Method = Literal["synchronous", "asynchronous", "elastic"]
Gradients = Sequence[Tensor] | Mapping[str, Tensor]
Number = TypeVar("Number", int, float)
_HALF = (torch.float16, torch.bfloat16)


def aggregate_gradients(
    gradients: Sequence[Gradients] | Gradients,
    method: Method = "synchronous",
    *,
    communicator: Communicator | None = None,
    weights: Sequence[float] | float | None = None,
    staleness: Sequence[int] | int = 0,
    power: float = 1.0,
    local: float = 0.5,
    rank: int = 0,
) -> list[Tensor] | dict[str, Tensor]:
    """The gradients to step with, by the equations at the top of this module.

    A worker's gradients are a list of tensors, or a mapping of names to tensors. Without ``communicator`` those of all
    workers are here; with one, every rank brings its own and gets its result. Nothing that is passed in is changed.
    Sums of half-precision gradients are made in fp32.

    Args:
        gradients: one entry a worker; with ``communicator`` this rank's entry alone.
        method: the rule.
        communicator: the ranks, all of which call with the same method and shapes.
        weights: w_i, for example samples; equal by default. A number with ``communicator``.
        staleness: s_i for ``asynchronous``, one number for all or one a worker; this rank's with ``communicator``.
        power: p of ``asynchronous``, at least 0.
        local: a of ``elastic``, from 0 to 1.
        rank: r of ``elastic``; with ``communicator`` its rank.

    Returns:
        New tensors in the structure, shapes, dtypes and places of one worker's gradients.

    Raises:
        ConfigurationError: an argument is out of range, or workers differ in names, number, shapes or dtypes (seen
            without ``communicator``).
        CommunicationError: no worker has a weight above zero (with ``communicator``, on every rank).
    """
    require_name("method of aggregation", method, get_args(Method))
    p, a = number(power), number(local)
    if p is None or a is None or not 0 <= p < math.inf or not 0 <= a <= 1:
        raise ConfigurationError(f"power={power} must be at least 0 and local={local} from 0 to 1: correct it.")
    if communicator is None:
        return _here(gradients, method, weights, staleness, power, local, rank)  # type: ignore[arg-type]
    weight = 1.0 if weights is None else weights
    if not isinstance(weight, (int, float)) or not is_whole(staleness):
        raise ConfigurationError(
            "with a communicator, weights and staleness are those of this rank: give a number each."
        )
    named = _named(gradients, "this rank")  # type: ignore[arg-type]
    factor = _weight(weight, communicator.rank) * _discount(method, staleness, power, communicator.rank)
    summed = {name: tensor.detach().to(_wide(tensor)) * factor for name, tensor in named.items()}
    total = _sum_over_ranks(communicator, summed, float(weight))
    mixed = {name: _mixed(method, named[name], value / total, local) for name, value in summed.items()}
    return _like(gradients, mixed)  # type: ignore[arg-type]


def _here(
    gradients: Sequence[Gradients],
    method: Method,
    weights: Sequence[float] | float | None,
    staleness: Sequence[int] | int,
    power: float,
    local: float,
    rank: int,
) -> list[Tensor] | dict[str, Tensor]:
    """The same where all workers' gradients are in this process."""
    if not isinstance(gradients, Sequence | Tensor):
        raise ConfigurationError(f"gradients are a {type(gradients).__name__}: give a list with those of each worker.")
    workers = len(gradients)
    if workers == 0:
        raise ConfigurationError("there are no gradients to aggregate: give those of one worker at least.")
    named = [_named(one, f"worker {worker}") for worker, one in enumerate(gradients)]
    if not is_whole(rank) or not 0 <= rank < workers:
        raise ConfigurationError(f"rank={rank} is none of {workers} workers: use one from 0 to {workers - 1}.")
    kinds = [{name: (tensor.shape, tensor.dtype) for name, tensor in one.items()} for one in named]
    for worker, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ConfigurationError(
                f"the gradients of worker {worker} differ from those of worker 0 in names, number, shapes or dtypes: "
                "pass the gradients of the same module."
            )
    each = _one_each(1.0 if weights is None else weights, workers, "weights")
    late = _one_each(staleness, workers, "staleness")
    total = sum(_weight(weight, worker) for worker, weight in enumerate(each))
    if total <= 0:
        raise ConfigurationError("no worker has a weight above zero: give at least one.")
    factors = [
        _weight(weight, worker) * _discount(method, stale, power, worker)
        for worker, (weight, stale) in enumerate(zip(each, late, strict=True))
    ]
    mixed = {}
    for name, first in named[rank].items():
        value = torch.zeros_like(first, dtype=_wide(first))
        for factor, one in zip(factors, named, strict=True):
            value.add_(one[name].detach().to(value), alpha=factor)
        mixed[name] = _mixed(method, first, value / total, local)
    return _like(gradients[rank], mixed)


def _mixed(method: Method, own: Tensor, everyone: Tensor, local: float) -> Tensor:
    if method == "elastic":
        everyone = everyone.mul_(1 - local).add_(own.detach().to(everyone), alpha=local)
    return everyone.to(own.dtype)


def _sum_over_ranks(communicator: Communicator, tensors: dict[str, Tensor], weight: float) -> float:
    """Replace ``tensors`` by their sums over the ranks, in place; returns the sum of the weights."""
    total = torch.tensor([weight], dtype=torch.float64, device=communicator.device)
    communicator.all_reduce(total)
    if not total.item() > 0:
        raise CommunicationError(f"no rank of group {communicator.label!r} has a weight above zero: give one at least.")
    for dtype in sorted({tensor.dtype for tensor in tensors.values()}, key=str):
        group = [tensor for tensor in tensors.values() if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1).to(communicator.device) for tensor in group])
        communicator.all_reduce(flat)
        for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(part.view(tensor.shape))
    return float(total.item())


def _named(gradients: Sequence[Tensor] | Mapping[str, Tensor], whose: str) -> dict[str, Tensor]:
    if isinstance(gradients, Tensor):  # its rows would pass for a list of tensors
        raise ConfigurationError(f"the gradients of {whose} are one tensor: put it into a list, or name it in a dict.")
    named = dict(gradients) if isinstance(gradients, Mapping) else {str(i): g for i, g in enumerate(gradients)}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            found = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigurationError(
                f"gradient {name} of {whose} is {found}, not a floating-point tensor: pass zeros where there is none."
            )
    return named


def _like(gradients: Gradients, named: dict[str, Tensor]) -> list[Tensor] | dict[str, Tensor]:
    return named if isinstance(gradients, Mapping) else list(named.values())


def _one_each(given: Sequence[Number] | Number, workers: int, what: str) -> list[Number]:
    if not isinstance(given, (int, float)) and (not hasattr(given, "__len__") or isinstance(given, str | Mapping)):
        raise ConfigurationError(f"{what}={given!r}: give a number, or a list with one for each worker.")
    values = [given] * workers if isinstance(given, (int, float)) else list(given)
    if len(values) != workers:
        raise ConfigurationError(f"there are {len(values)} {what} for {workers} workers: give one for each.")
    return values


def _weight(weight: float, worker: int) -> float:
    found = number(weight)
    if found is None or not 0 <= found <= sys.float_info.max:
        raise ConfigurationError(f"the weight of worker {worker} is {weight!r}: give a number of at least 0.")
    return float(found)


def _discount(method: Method, staleness: object, power: float, worker: int) -> float:
    if not is_whole(staleness) or staleness < 0:  # type: ignore[operator]
        raise ConfigurationError(f"the staleness of worker {worker} is {staleness!r}: count updates from 0.")
    if method != "asynchronous":
        return 1.0
    try:
        return 1.0 / (1.0 + int(staleness)) ** power  # type: ignore[call-overload]
    except OverflowError:  # what is so late counts nothing
        return 0.0 if power else 1.0


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in _HALF else tensor.dtype
