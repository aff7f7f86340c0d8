"""Groups of parameters that an optimizer is given while it trains, where a strategy keeps something for each."""

from __future__ import annotations

from torch.optim import Optimizer

from drivetrain.errors import TrainingError


def refuse_new_groups(optimizer: Optimizer, known: int, name: str) -> None:
    """Raise :class:`TrainingError` unless ``optimizer`` has the ``known`` number of groups that it had when
    ``strategy=name`` laid out its parameters."""
    if len(optimizer.param_groups) != known:
        raise TrainingError(
            f"{type(optimizer).__name__} was given a group of parameters while strategy={name} trains, which has laid"
            " them out when training began: configure all groups, with a learning rate of 0 until they are to train,"
            " or use strategy=ddp."
        )
