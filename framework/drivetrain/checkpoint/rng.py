"""The state of every global random generator of one worker: torch, CUDA, numpy, Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from drivetrain.errors import CheckpointError


def capture() -> dict[str, Any]:
    """The generators' states as they are now.

    CUDA generators are read only where CUDA is already initialised: looking must not create a context.
    Keep the result with :func:`drivetrain.checkpoint.directory.save`, or through ``to_safe`` with ``torch.save``.
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def restore(state: dict[str, Any]) -> None:
    """Put every generator back to where :func:`capture` found it; the numbers that follow are the same, bit for bit.

    Devices that the state knows and this process has not, or the other way round, keep what they have.

    Raises:
        CheckpointError: ``state`` lacks a generator, or holds something that is no generator's state.
    """
    try:
        numpy_state, python_state = state["numpy"], state["python"]
        torch.set_rng_state(state["torch"].cpu())
        if state["cuda"] and torch.cuda.is_available():
            for device, value in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(value.cpu(), device)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(
            f"the state of the random generators cannot be restored ({type(error).__name__}: {error}); "
            "resume without it or from another checkpoint"
        ) from error


@contextmanager
def kept() -> Iterator[None]:
    """What is drawn within leaves the generators as they were."""
    state = capture()
    yield
    restore(state)
