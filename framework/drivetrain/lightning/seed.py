"""Lightning's ``seed_everything``: drivetrain's, which also tells workers and later Trainers the seed."""

from __future__ import annotations

import os

import drivetrain.seeding
from drivetrain import worker_seeds
from drivetrain.errors import ConfigurationError
from drivetrain.rank_zero import rank_zero_only

min_seed_value, max_seed_value = 0, 2**32 - 1  # what numpy takes


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
    if not min_seed_value <= int(seed) <= max_seed_value:
        raise ValueError(f"seed={seed}: numpy takes whole numbers from 0 to 2^32 - 1.")
    first = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) == 0
    found = drivetrain.seeding.seed_everything(int(seed), verbose=verbose and first)
    os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"] = str(found), str(int(workers))
    return found


def reset_seed() -> None:
    """Begin again with the seed of the last :func:`seed_everything`; nothing without one."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    if seed is not None:
        seed_everything(int(seed), workers=os.environ.get("PL_SEED_WORKERS", "0") == "1", verbose=False)


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """A loader's ``worker_init_fn``: what ``seed_everything(seed, workers=True)`` lets loaders have by itself."""
    worker_seeds.seed_worker(worker_id, getattr(rank_zero_only, "rank", 0) if rank is None else rank)
