"""Which parameters a backward pass reached on this rank.

Engines that cut gradients up reduce those that there are, one after the other, and look at no name: where a rank used
one expert and another rank the next of the same shape, the two gradients would be summed as if they were one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.comm.communicator import Communicator
from drivetrain.errors import TrainingError
from drivetrain_plugins.strategies.dtensors import local


@contextmanager
def reached_alike(parameters: Mapping[str, nn.Parameter], communicator: Communicator) -> Iterator[None]:
    """Around a backward pass after which gradients are reduced: every rank must have reached the same parameters.

    Ranks ask each other only where parameters are missing. That all of them do so then is what the reduction sees to:
    a rank that misses none brings more than the others, which ends the job there.

    Raises:
        TrainingError: the ranks reached different parameters.
    """
    former = {name: (parameter.grad, _writes(parameter.grad)) for name, parameter in parameters.items()}
    yield
    missing = []
    for name, parameter in parameters.items():
        gradient, writes = former[name]
        if parameter.grad is gradient and _writes(gradient) == writes:
            missing.append(name)
    if not missing:
        return
    absent = torch.tensor([name in missing for name in parameters], dtype=torch.int64, device=communicator.device)
    counts = communicator.all_reduce(absent).tolist()
    differing = [name for name, count in zip(parameters, counts, strict=True) if 0 < count < communicator.world_size]
    if differing:
        raise TrainingError(
            f"the ranks' losses depend on different parameters ({_listed(differing)} on some ranks only), whose"
            " gradients are reduced together in shards: add a term that uses them times zero on every rank, or use"
            " strategy=ddp with strategy.find_unused_parameters=true."
        )


class Reached:
    """Notes which of ``parameters`` the backward passes reach, for engines that keep gradients to themselves."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self._names: set[str] = set()
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._names.add(name))
            for name, parameter in parameters.items()
        ]

    def require_all(self, rank: int) -> None:
        """After a backward pass: all must have been reached in it.

        Raises:
            TrainingError: some were not.
        """
        missing = [name for name in self.parameters if name not in self._names]
        self._names.clear()
        if missing:
            raise TrainingError(
                f"parameters without a gradient on rank {rank}: {_listed(missing)}: DeepSpeed reduces and steps all of"
                " them; freeze them with requires_grad=False, or use strategy=ddp with"
                " strategy.find_unused_parameters=true."
            )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _writes(gradient: Tensor | None) -> int:
    """How often it was written to."""
    return 0 if gradient is None else local(gradient)._version


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{' and more' if len(names) > 5 else ''}"
