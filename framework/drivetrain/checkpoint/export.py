"""Out of a checkpoint, without the job that wrote it: a model's weights, or one file in Lightning's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drivetrain.checkpoint import layout, single
from drivetrain.checkpoint.directory import load, own_states
from drivetrain.errors import CheckpointError

WEIGHTS = "state_dict"


def consolidate(path: str | Path, *, verify: bool = True) -> dict[str, Any]:
    """The full, unsharded ``state_dict`` in the checkpoint at ``path``: CPU tensors, ready for ``load_state_dict``.

    Only the weights are made use of, not the states of the optimizers.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or holds no ``state_dict``.
    """
    if single.is_file(path):
        content = single.read(path, check=verify)
    else:
        content = load(path, keys=(WEIGHTS,), verify=verify).shared
    weights = content.get(WEIGHTS)
    if not isinstance(weights, dict):
        raise CheckpointError(
            f"{WEIGHTS!r} in the checkpoint {path} is a {type(weights).__name__} and no dictionary of weights; "
            "save the module's state_dict under that key"
        )
    return weights


def to_file(path: str | Path, target: str | Path) -> Path:
    """Write the directory checkpoint at ``path`` as one file at ``target``, for drivetrain and for Lightning.

    Training goes on from it as from the directory, to the bit on the same number of workers.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, a file already, or ``target`` cannot be written.
    """
    if single.is_file(path):
        raise CheckpointError(f"{path} is one file already: copy it")
    loaded = load(path)
    shared = loaded.shared
    if "loops" in shared and "run" not in shared:
        raise CheckpointError(
            f"the checkpoint {path} was written by a version of drivetrain that did not keep what Lightning's counters"
            " need: resume from it and save again"
        )
    owns = [layout.pack(own) for own in own_states(path)]
    content = layout.compose(shared, owns, loaded.meta["strategy"])
    content |= {key: value for key, value in shared.items() if key not in layout.KNOWN}  # what hooks have added
    return single.write(content, target)
