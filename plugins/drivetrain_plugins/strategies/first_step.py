"""What an optimizer's first step made of the parameters that a rank or server has, compared over all that have others.

An optimizer that looks at all parameters together (Prodigy and D-Adaptation sum over them to find a step size) makes
something else of each part, and then trains otherwise than on one process. It shows in the numbers that it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.comm.communicator import Communicator
from drivetrain.errors import TrainingError
from drivetrain.optimizer import is_torchs


class FirstStep:
    """Compares once for each optimizer; torch's own, which step each parameter by itself, are not looked at.

    Args:
        communicator: the ranks that step parts of the same parameters.
        strategy: its name, for the error.
        names: ``id(parameter)`` to its name, of those that the optimizer steps here.
        of_all: whether each rank has a part of every parameter, and so of every group.
    """

    def __init__(
        self,
        communicator: Communicator,
        strategy: str,
        names: Callable[[Optimizer], Mapping[int, str]],
        *,
        of_all: bool,
    ) -> None:
        self.communicator, self.strategy, self.names, self.of_all = communicator, strategy, names, of_all
        self._seen: set[int] = set()

    def step(self, optimizer: Optimizer, make: Callable[[], bool]) -> bool:
        """``make()``, the optimizer's step; the first that is not skipped is compared. Every rank calls it.

        Raises:
            TrainingError: on every rank, as :func:`refuse_unlike`.
        """
        if id(optimizer) in self._seen:
            return make()
        alone = self.communicator.world_size == 1 or is_torchs(optimizer)
        before = {} if alone else self._numbers(optimizer)
        if not make():
            return False
        self._seen.add(id(optimizer))
        if not alone:
            own = changed(before, self._numbers(optimizer))
            kind = type(optimizer).__name__
            refuse_unlike(self.communicator.all_gather_plain(own), kind, "rank", self.strategy, "use strategy=ddp")
        return True

    def _numbers(self, optimizer: Optimizer) -> dict[str, str]:
        return numbers(optimizer, self.names(optimizer), of_all=self.of_all)


def numbers(optimizer: Optimizer, names: Mapping[int, str], *, of_all: bool = False) -> dict[str, str]:
    """What ``optimizer`` keeps, place by place, as far as it is a number: in its groups, in states of parameters that
    have a name, and beside them. A group without parameters here speaks of all groups where one that has some says the
    same; else it says nothing of those that it has elsewhere. ``of_all`` as in :class:`FirstStep`."""
    found: dict[str, str] = {}
    groups = [{k: text for k, value in group.items() if (text := _number(value))} for group in optimizer.param_groups]
    held = [of_all or bool(group["params"]) for group in optimizer.param_groups]
    for index, group in enumerate(groups):
        for name, text in group.items():
            if held[index] or any(has and other.get(name) == text for other, has in zip(groups, held, strict=True)):
                found[f"param_groups[{index}][{name!r}]"] = text
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            _collect(f"state[{key!r}]", value, found)
        elif id(key) in names:
            _collect(f"state[{names[id(key)]}]", value, found, key.shape)
    return found


def _collect(place: str, value: Any, found: dict[str, str], weights: torch.Size | None = None) -> None:
    """``weights``: the shape of the parameter's, for a part of a single weight has states of one element."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _collect(f"{place}[{key!r}]", item, found, weights)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _collect(f"{place}[{index}]", item, found, weights)
    elif not (isinstance(value, Tensor) and value.shape == weights):
        text = _number(value)
        if text is not None:
            found[place] = text


def _number(value: Any) -> str | None:
    """A DTensor is none: what a rank holds of it need not be what it stands for."""
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 and not isinstance(value, DTensor) else None
    return repr(value) if isinstance(value, (int, float)) else None


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """What of :func:`numbers` a step changed: who has no part in a number, or no gradient for it, leaves it alone."""
    return {place: text for place, text in after.items() if before.get(place) != text}


def refuse_unlike(found: Sequence[Mapping[str, str]], kind: str, who: str, strategy: str, way_out: str) -> None:
    """Compare :func:`changed` of all who hold parts.

    Args:
        kind: the optimizer's class.
        who: what they are called.

    Raises:
        TrainingError: two of them changed the same number to something else.
    """
    known: dict[str, tuple[int, str]] = {}
    for index, one in enumerate(found):
        for place, text in one.items():
            first, other = known.setdefault(place, (index, text))
            if text != other:
                raise TrainingError(
                    f"{kind} keeps something beside the states of single weights that differs from {who} to {who} after"
                    f" the first step ({place} is {other} on {who} {first} and {text} on {who} {index}): it looks at"
                    f" weights together, of which {strategy} gives each {who} a part; {way_out}."
                )
