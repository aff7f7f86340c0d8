"""Lightning's ``seed_everything``: drivetrain's, which also tells workers and later Trainers the seed."""

from __future__ import annotations

import os

import drivetrain.seeding
from drivetrain.errors import ConfigurationError


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed torch (all devices), numpy and Python's ``random``; returns the seed.

    Args:
        seed: by default ``PL_GLOBAL_SEED`` of the environment, else 0.
        workers: seed numpy and Python's ``random`` in loader workers, too (:mod:`drivetrain.worker_seeds`);
            else as torch does.
        verbose: say so, on the first worker.

    Raises:
        ConfigurationError: ``PL_GLOBAL_SEED`` is no number.
        ValueError: the seed is negative, or more than 32 bits.
    """
    if seed is None:
        text = os.environ.get("PL_GLOBAL_SEED", "0")
        try:
            seed = int(text)
        except ValueError:
            raise ConfigurationError(f"PL_GLOBAL_SEED={text!r}: give a whole number.") from None
    if not 0 <= int(seed) < 2**32:
        raise ValueError(f"seed={seed}: numpy takes whole numbers from 0 to 2^32 - 1.")
    first = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) == 0
    found = drivetrain.seeding.seed_everything(int(seed), verbose=verbose and first)
    os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"] = str(found), str(int(workers))
    return found
