"""What an optimizer keeps beside the states of parameters, where each rank steps a part of what there is to step: it is
saved once for all of them, and none of them could tell what of it would be whose."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Size, Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.comm.communicator import Communicator
from drivetrain.errors import CheckpointError, ConfigurationError, TrainingError


def refuse_own_parts(optimizer: Optimizer, strategy: str) -> None:
    """Weights that an optimizer keeps a second time (Lookahead's slow ones) are in an order and a shape that only it
    knows: nobody else could put together those of several ranks, nor take them apart for another number of ranks.

    Raises:
        ConfigurationError: ``optimizer.state_dict()`` has more parts than ``state`` and ``param_groups``.
    """
    parts = sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"}))
    if parts:
        raise ConfigurationError(
            f"{type(optimizer).__name__}.state_dict() has parts of its own ({', '.join(parts)}), which {strategy}"
            " cannot save for all ranks together: use strategy=ddp."
        )


def refuse_shards(optimizer: Optimizer, named: Mapping[str, Any]) -> None:
    """As :func:`refuse_own_parts`, of DTensors: without a parameter to go by, nobody could cut them again.

    Args:
        named: the optimizer's :func:`drivetrain.named_optimizer.named_state`.

    Raises:
        TrainingError: there are some beside the states of parameters.
    """
    if any(isinstance(leaf, DTensor) for part in ("beside", "further") for leaf in _leaves(named.get(part))):
        raise TrainingError(
            f"{type(optimizer).__name__} keeps tensors beside the states of parameters of which each rank holds a part:"
            " no checkpoint could give them back to it; use strategy=ddp."
        )


def refuse_whole(optimizer: Optimizer, named: Mapping[str, Any], shapes: Iterable[Size]) -> None:
    """As :func:`refuse_shards`, of a checkpoint that a strategy with whole parameters wrote: nobody could cut them.

    Args:
        named: the saved :func:`drivetrain.named_optimizer.named_state`.
        shapes: those of the whole parameters.

    Raises:
        CheckpointError: there are tensors of a parameter's shape beside the states of parameters.
    """
    known = {shape for shape in shapes if shape.numel() > 1}
    for part in ("beside", "further"):
        if any(isinstance(leaf, Tensor) and leaf.shape in known for leaf in _leaves(named.get(part))):
            raise CheckpointError(
                f"the checkpoint holds whole tensors that {type(optimizer).__name__} keeps beside the states of"
                f" parameters ({', '.join(map(str, named[part]))}), and here each rank holds a part of every parameter:"
                " go on with strategy=ddp, or load the weights only."
            )


def refuse_different(communicator: Communicator, optimizer: Optimizer, strategy: str) -> None:
    """Counts of steps are the same on all ranks; what is not is made of the parameters of each. Every rank calls it.

    Raises:
        TrainingError: on every rank, where what ``optimizer`` keeps under keys of its own, or a number in its groups,
            is not the same on all.
    """
    beside = {str(key): value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    settings = [
        {key: value for key, value in group.items() if isinstance(value, (int, float))}
        for group in optimizer.param_groups
    ]
    plain = [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in _leaves([beside, settings])]
    if len(set(communicator.all_gather_plain(hashlib.sha256(repr(plain).encode()).hexdigest()))) > 1:
        raise TrainingError(
            f"{type(optimizer).__name__} keeps something beside the states of parameters that differs from rank to"
            f" rank, so that {strategy} cannot save it as one: use strategy=ddp."
        )


def _leaves(value: Any) -> Iterator[Any]:
    """Keys and values of any nesting, in their order."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
