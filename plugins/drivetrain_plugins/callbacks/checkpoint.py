"""Checkpoint: the base of callbacks that save checkpoints, by which a Trainer knows that it has one."""

from __future__ import annotations

from drivetrain.callback import Callback


class Checkpoint(Callback):
    """Derive a checkpoint callback of your own from it: it runs last, and no default one is added beside it."""

    saves_checkpoints = True
