"""Checkpoint: what callbacks derive from that save checkpoints, so that they run last."""

from __future__ import annotations

from drivetrain.callback import Callback


class Checkpoint(Callback):
    """The base of callbacks that save; what the others changed is in the checkpoint, as these are called after them.
    No default one is added beside it."""

    saves_checkpoints = True
    monitors = True
    rebuilds = False
