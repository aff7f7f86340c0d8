"""A model's weights out of a checkpoint, without the job that wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drivetrain.checkpoint.directory import load
from drivetrain.errors import CheckpointError

WEIGHTS = "state_dict"


def consolidate(path: str | Path, *, verify: bool = True) -> dict[str, Any]:
    """The full, unsharded ``state_dict`` in the checkpoint at ``path``: CPU tensors, ready for ``load_state_dict``.

    Only the weights are read, not the states of the optimizers.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or holds no ``state_dict``.
    """
    weights = load(path, keys=(WEIGHTS,), verify=verify).shared[WEIGHTS]
    if not isinstance(weights, dict):
        raise CheckpointError(
            f"{WEIGHTS!r} in the checkpoint {path} is a {type(weights).__name__} and no dictionary of weights; "
            "save the module's state_dict under that key"
        )
    return weights
