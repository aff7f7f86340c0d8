"""Which parameters a backward pass reached on this rank.

Engines that cut gradients up reduce those that there are, one after the other, and look at no name: where a rank used
one expert and another rank the next of the same shape, the two gradients would be summed as if they were one's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.agreement import Agreement
from drivetrain.errors import TrainingError
from drivetrain.launch.job import Job
from drivetrain_plugins.strategies.dtensors import local


class ReachedAlike:
    """Whether the ranks' backward passes reach the same parameters, for engines that reduce gradients within a pass.

    Args:
        parameters: those that are trained, as a pass leaves gradients in them.
        job: all its ranks reduce together.

    Attributes:
        found: what the last pass reached.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], job: Job) -> None:
        self.parameters = parameters
        self.found: list[str] = []
        self._passes = 0
        # A little less than what NCCL waits for a collective, and then ends the process without these words.
        self._agreement = Agreement("reached", job.rank, range(job.world_size), 0.9 * job.timeout)

    def close(self) -> None:
        self._agreement.close()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around a backward pass. A rank asks the others only where parameters are missing: not in a collective, for
        one that misses none is in the next of those already, or waits in that which took more from it than from others.

        Raises:
            TrainingError: the ranks reached different parameters.
        """
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        former = {name: (parameter.grad, _writes(parameter.grad)) for name, parameter in trained.items()}
        yield
        self._passes += 1
        missing = []
        for name, parameter in trained.items():
            gradient, writes = former[name]
            if parameter.grad is gradient and _writes(gradient) == writes:
                missing.append(name)
        self.found = [name for name in trained if name not in missing]
        if not missing:
            self._agreement.passed = (self._passes,)
            return

        def heard(rank: int, theirs: str | None) -> None:
            differing = sorted(set(missing) ^ set(json.loads(theirs or "[]")))
            if differing:
                raise TrainingError(
                    f"the ranks' losses depend on different parameters ({_listed(differing)} on some ranks only), whose"
                    " gradients are reduced together in shards: add a term that uses them times zero on every rank, or"
                    " use strategy=ddp with strategy.find_unused_parameters=true."
                )

        try:
            self._agreement.ask((self._passes,), json.dumps(missing), heard)
        except TimeoutError as error:
            raise TrainingError(f"parameters without a gradient: {_listed(missing)}, and {error}") from None


class Reached:
    """Notes which of ``parameters`` the backward passes reach, for engines that keep gradients to themselves."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self._names: dict[str, None] = {}  # in the order in which a pass came to them
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._names.setdefault(name))
            for name, parameter in parameters.items()
        ]

    @contextmanager
    def required(self, loss: Tensor, rank: int) -> Iterator[None]:
        """Around a backward pass from ``loss``, which must reach all. It is looked at when the graph's last node has
        run, not after the pass: DeepSpeed ends that by waiting for its reductions, which on a GPU end only where every
        rank brings as much.

        Raises:
            TrainingError: some were not reached.
        """

        def require() -> None:
            missing = [name for name in self.parameters if name not in self._names]
            if missing:
                raise TrainingError(
                    f"parameters without a gradient on rank {rank}: {_listed(missing)}: DeepSpeed reduces and steps all"
                    " of them; freeze them with requires_grad=False, or use strategy=ddp with"
                    " strategy.find_unused_parameters=true."
                )

        def queue(_: Tensor) -> None:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(require)

        self._names.clear()
        handle = loss.register_hook(queue)
        try:
            yield
        finally:
            handle.remove()

    @property
    def names(self) -> list[str]:
        """What the last pass reached, in its order."""
        return list(self._names)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _writes(gradient: Tensor | None) -> int:
    """How often it was written to."""
    return 0 if gradient is None else local(gradient)._version


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{' and more' if len(names) > 5 else ''}"
