"""Seeds of a loader's worker processes, one for each library that draws numbers there.

Numbers drawn in workers are Lightning's after ``seed_everything(seed, workers=True)``: the seed of torch's loader, the
worker and the rank are put side by side, mixed (finalizer of MurmurHash3) and run through Knuth's generator.
"""

from __future__ import annotations

import os
import random
import sys
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

_WORD = (1 << 64) - 1


def seed_worker(worker: int, rank: int) -> None:
    """A ``worker_init_fn``: seed torch, Python and numpy in ``worker`` (from 0) of the loader of ``rank``."""
    base = torch.initial_seed() - worker
    first, high, low = _sequence(base, worker, rank, 3)
    torch.manual_seed(first)
    random.seed((high << 32) | low)
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        numpy.random.seed(numpy.random.SeedSequence([base, worker, rank]).generate_state(4))


def add_to(loaders: Any, rank: int) -> None:
    """Have the workers of ``loaders`` (nested as they like) seeded, where that was wished and they are not already."""
    if os.environ.get("PL_SEED_WORKERS", "0") != "1":
        return
    for loader in getattr(loaders, "flattened", None) or tree_leaves(loaders):
        if isinstance(loader, DataLoader) and loader.worker_init_fn is None:
            loader.worker_init_fn = partial(seed_worker, rank=rank)


def _sequence(base: int, worker: int, rank: int, count: int) -> list[int]:
    state = (base << 32) | (worker << 16) | rank
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        state = ((state ^ (state >> 33)) * factor) & _WORD
    state ^= state >> 33
    found = []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1) & _WORD
        found.append(state)
    return found
