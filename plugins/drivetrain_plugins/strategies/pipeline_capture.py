"""A module's step around a network that runs elsewhere: what it gives to the network, and what it makes of the output.

The user's step runs unchanged on both ends of the pipeline. On the first rank the network only notes what it is called
with and the step is abandoned; on the last rank the network answers with what came out of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import metric_states
from drivetrain.errors import ConfigurationError, TrainingError
from drivetrain.module import TrainModule
from drivetrain_plugins.strategies.kept_on_module import KeptOnModule

_STEP = (
    "a step under a pipeline, whose ranks run different parts of it, so that it would wait in vain: log the value,"
    " which ranks combine, or call it in a hook such as on_validation_epoch_end."
)


class _Recorded(Exception):
    """The network was called: the rest of the step is not needed here."""


@dataclass(frozen=True)
class Call:
    """What the network is called with: tensors with the samples in their first dimension."""

    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]


class Capture:
    """Stands in for ``network``, which is ``path`` in ``module``."""

    def __init__(self, module: TrainModule, path: str, network: nn.Module) -> None:
        self.module, self.network = module, network
        self.name = name_of(path)

    def record(self, step: Callable[[Any], Any], batch: Any, counts: bool) -> Call:
        """What ``step(batch)`` calls the network with. Nothing is logged on the way: the last rank does that.

        Args:
            counts: whether this is the step's start; else the step was or will be started for this batch again, and
                buffers, metrics and what it keeps on the module stay as they were.
        """
        calls: list[Call] = []

        def note(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                if not isinstance(value, Tensor):
                    raise TrainingError(
                        f"{self.name}(...) is called with a {type(value).__name__}, and a pipeline sends tensors:"
                        " give it tensors with the samples in their first dimension."
                    )
            calls.append(Call(tuple(args), kwargs))
            raise _Recorded

        try:
            with self._forward(note), self._silent(), nullcontext() if counts else self._untouched():
                step(batch)
        except _Recorded:
            return calls[0]
        raise ConfigurationError(
            f"{type(self.module).__name__} does not call {self.name}(...) in its step, so a pipeline has nothing to"
            " run: call it once, or name the network that is called with strategy.network."
        )

    def answer(self, step: Callable[[Any], Any], batch: Any, output: Any, logs: bool = True) -> Any:
        """``step(batch)`` with ``output`` as the network's answer to its one call. Not ``logs``: another rank does."""
        calls = 0

        def answer(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise called_again(self.module, self.name)
            return output

        with self._forward(answer), nullcontext() if logs else self._silent():
            return step(batch)

    @contextmanager
    def _forward(self, stand_in: Callable[..., Any]) -> Iterator[None]:
        """The network's forward replaced on the instance: its other attributes stay within the step's reach."""
        own = self.network.__dict__
        former = own.get("forward")
        own["forward"] = stand_in
        strategy = self.module.trainer.strategy
        strategy.apart = _STEP
        try:
            yield
        finally:
            strategy.apart = None
            if former is None:
                del own["forward"]
            else:
                own["forward"] = former

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        owned = [(owner, *item) for owner in self.module.modules() for item in owner._buffers.items()]
        buffers = [(owner, name, one, one.clone()) for owner, name, one in owned if one is not None]
        gathered, kept = metric_states.states(self.module), KeptOnModule(self.module)
        try:
            yield
        finally:
            kept.restore()
            for owner, name, buffer, value in buffers:
                with torch.no_grad():
                    owner._buffers[name] = buffer.copy_(value)
            metric_states.load(self.module, gathered)

    @contextmanager
    def _silent(self) -> Iterator[None]:
        own = self.module.__dict__
        own["log"] = _nothing
        try:
            yield
        finally:
            del own["log"]


def name_of(path: str) -> str:
    """The network at ``path`` as the module's own methods write it."""
    return f"self.{path}" if path else "self"


def called_again(module: nn.Module, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(module).__name__} calls {name}(...) more than once in a step, and a pipeline runs it once: call it once"
        " with all samples, or use strategy=ddp."
    )


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of ``self.log``."""
