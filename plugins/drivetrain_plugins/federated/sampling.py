"""Who takes part in a round, and in which order a client reads its data: drawn from seed, round and client alone.

Nothing here depends on the number of ranks or on what came before, so any round can be repeated or resumed.
"""

from __future__ import annotations

import random

import numpy as np
import torch

Windows = list[list[list[int]]]  # the micro-batches (of sample numbers) of each local step


def sample_clients(clients: int, count: int, seed: int, round_number: int) -> list[int]:
    """``count`` of ``clients``, each as likely as the others, without repetition; rising."""
    generator = np.random.default_rng([seed, round_number])
    return sorted(generator.choice(clients, count, replace=False).tolist())


def local_windows(
    samples: list[int],
    *,
    batch_size: int,
    accumulate: int,
    shuffle: bool,
    drop_last: bool,
    epochs: int,
    steps: int | None,
    limit: int | float | None,
    key: tuple[int, ...],
) -> Windows:
    """A client's local steps of one round: ``epochs`` passes over its ``samples``, or just ``steps`` steps.

    Args:
        accumulate: micro-batches a step; a pass may end in a shorter one.
        drop_last: leave out a short last batch, unless it is the only one.
        limit: most micro-batches of a pass, or as a float the part of them that is read: at least one.
        key: seed, round and client, of which the order of each pass is drawn.
    """
    windows: Windows = []
    number = 0
    while len(windows) < steps if steps is not None else number < epochs:
        order = np.random.default_rng([*key, number]).permutation(samples).tolist() if shuffle else samples
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        if drop_last and len(batches) > 1 and len(batches[-1]) < batch_size:
            batches.pop()
        batches = batches[: max(1, int(limit * len(batches))) if isinstance(limit, float) else limit]
        windows += [batches[start : start + accumulate] for start in range(0, len(batches), accumulate)]
        number += 1
    return windows[:steps]


def seed_client(*key: int) -> None:
    """Random numbers of a client's training (dropout, augmentation), the same on whatever rank it is trained."""
    number = int(np.random.default_rng(key).integers(2**63))
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)
