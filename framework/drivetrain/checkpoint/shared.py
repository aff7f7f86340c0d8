"""Whether all ranks see one folder: asked before training, for a checkpoint would fail only hours later."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from pathlib import Path

from drivetrain.checkpoint.agreement import Communicator
from drivetrain.errors import ConfigurationError

PATIENCE = 3.0  # seconds that a network file system may take to show on one machine what another has made


def refuse_unshared(folder: Path, communicator: Communicator, patience: float = PATIENCE) -> None:
    """All ranks call it; ``folder`` exists where rank 0 runs.

    Raises:
        ConfigurationError: on every rank, when some rank does not see what rank 0 makes in ``folder``.
    """
    mark = folder / f".{uuid.uuid4().hex}.shared"
    try:
        if communicator.rank == 0:
            with suppress(OSError):  # then rank 0 does not see it either, and all ranks hear so
                mark.touch()
        name = communicator.all_gather_plain(mark.name)[0]
        deadline = time.monotonic() + patience
        while not (seen := (folder / name).exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        blind = [str(rank) for rank, sees in enumerate(communicator.all_gather_plain(seen)) if not sees]
    finally:
        if communicator.rank == 0:
            mark.unlink(missing_ok=True)
    if blind:
        raise ConfigurationError(
            f"checkpoints would go to {folder}, but rank {', '.join(blind)} does not see what rank 0 makes there: "
            "choose a folder on a file system that all nodes share, or save no checkpoints."
        )
