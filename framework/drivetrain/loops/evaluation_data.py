"""How loaders are read where nothing is trained: in which order, from when on, to which end, and without gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.sharding import BatchSource, MicroBatch

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


def without_gradients(trainer: Trainer) -> AbstractContextManager[Any]:
    """Inference mode or, where that is not meant or would be in the way, ``torch.no_grad``.

    Within a fit a project may train on what it kept of a validation, which inference mode forbids. And a metric that
    gathers its state keeps a copy of it meanwhile, which made there could not be added to in a fit; over Gloo Lightning
    goes without it, too.
    """
    job = trainer.strategy.job
    forbidden = trainer.stage == "fit" or (job.world_size > 1 and job.backend == "gloo")
    return torch.inference_mode() if trainer.inference_mode and not forbidden else torch.no_grad()


def choose_epoch(trainer: Trainer, sources: list[BatchSource], counts: bool) -> None:
    """Samplers that shuffle do so by the epochs that were trained where the data ``counts`` them, else as in the first.
    Lightning does so after a fit in a test and a prediction, too."""
    counts = counts or trainer.meanings.order == "torch"
    for source in sources:
        source.set_epoch(trainer.current_epoch if counts else 0)


def open_first(sources: list[BatchSource]) -> None:
    """The first loader draws from the generators before hooks of the stage's start do, a further one when its turn
    comes, as in Lightning."""
    for source in sources:
        source.look()
    for source in sources[:1]:
        source.open()


def together(source: BatchSource, trainer: Trainer) -> Iterator[MicroBatch]:
    """What ``source`` gives. Where each rank's forward pass waits for the others' and each reads a stream of its own,
    whose end nobody knows before, it ends for all with the shortest (a small gather a batch, there only)."""
    strategy = trainer.strategy
    if not (strategy.data.lockstep and source.own_stream and source.uncounted):
        yield from source
        return
    reader = iter(source)
    while True:
        micro = next(reader, None)
        mine = torch.tensor([micro is not None], dtype=torch.float64, device=strategy.device)
        found = [bool(one) for one in strategy.gather(mine)]
        if micro is None or not all(found):
            if any(found) and trainer.is_global_zero:
                warnings.warn(
                    "the ranks' streams are not of one length: what is left of the longer ones is not evaluated, since"
                    f" under strategy={strategy.name} every rank takes part in every batch.",
                    stacklevel=2,
                )
            return
        yield micro
