"""Which samples a client has. Every partition is disjoint and complete, and depends on its seed only."""

from __future__ import annotations

import numpy as np

from drivetrain.errors import ConfigurationError

_TRIES = 10


def iid(samples: int, clients: int, seed: int) -> list[list[int]]:
    """A random split of ``samples`` into parts whose sizes differ by at most one."""
    if samples < clients:
        raise ConfigurationError(
            f"{samples} samples cannot be divided among {clients} clients: set strategy.clients to at most {samples}."
        )
    order = np.random.default_rng(seed).permutation(samples)
    return [part.tolist() for part in np.array_split(order, clients)]


def dirichlet(labels: list[int], clients: int, alpha: float, seed: int, min_samples: int = 1) -> list[list[int]]:
    """Label skew: for each label the shares of the clients are drawn from a symmetric Dirichlet distribution.

    Hsu, Qi and Brown, arXiv 1909.06335. Small ``alpha``: few labels a client; large: as IID. Drawn anew (ten times at
    most) while a client has fewer than ``min_samples``.

    Raises:
        ConfigurationError: no draw gave every client its samples.
    """
    array = np.asarray(labels)
    for attempt in range(_TRIES):
        generator = np.random.default_rng([seed, attempt])
        parts: list[list[int]] = [[] for _ in range(clients)]
        for label in np.unique(array):
            members = generator.permutation(np.flatnonzero(array == label))
            shares = generator.dirichlet(np.full(clients, alpha))
            if not np.isfinite(shares).all():  # a tiny alpha underflows
                break
            ends = np.rint(np.cumsum(shares) * len(members)).astype(int)[:-1]
            for part, chosen in zip(parts, np.split(members, ends), strict=True):
                part.extend(chosen.tolist())
        else:
            if min(map(len, parts)) >= min_samples:
                return parts
    raise ConfigurationError(
        f"no Dirichlet partition of {len(labels)} samples with alpha={alpha} gave each of {clients} clients"
        f" {min_samples} samples: raise strategy.alpha, or lower strategy.clients or strategy.min_samples."
    )
