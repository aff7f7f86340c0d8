"""One seed for every generator of this process."""

from __future__ import annotations

import os
import random
import sys

import numpy
import torch

from drivetrain.errors import ConfigurationError


def seed_everything(seed: int = 1, workers: bool = True, verbose: bool = False) -> int:
    """Seed torch (all devices), numpy and Python's ``random``; returns the seed.

    ``workers`` is accepted for Lightning's sake: data-loader workers are seeded by sample in any case.
    """
    if not 0 <= seed < 2**63:
        raise ConfigurationError(f"seed={seed}: give a whole number from 0 to 2^63 - 1.")
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if verbose:
        print(f"seed set to {seed}", file=sys.stderr)  # a script's standard output is its own
    return seed


def start_anew() -> None:
    """Seed everything as the script did that called Lightning's ``seed_everything``; nothing where it didn't."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    if seed is not None:
        seed_everything(int(seed))


def told() -> dict[str, str | None]:
    """What the script's last call of Lightning's ``seed_everything`` left in the environment; None for nothing."""
    return {name: os.environ.get(name) for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}


def tell(found: dict[str, str | None]) -> None:
    """Leave in this process's environment what :func:`told` found in another one's. A module of the project's that a
    worker imports may seed as it is imported, which in the script came before the seed that counts."""
    for name, value in found.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
