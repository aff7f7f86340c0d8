"""Which samples a client has. Every partition is disjoint and complete, and depends on its seed only."""

from __future__ import annotations

import numpy as np

from drivetrain.errors import ConfigurationError

_TRIES = 10


def iid(samples: int, clients: int, seed: int) -> list[list[int]]:
    """A random split of ``samples`` into parts whose sizes differ by at most one."""
    check_enough(samples, clients)
    order = np.random.default_rng(seed).permutation(samples)
    return [part.tolist() for part in np.array_split(order, clients)]


def dirichlet(labels: list[int], clients: int, alpha: float, seed: int, min_samples: int = 1) -> list[list[int]]:
    """Label skew: for each label the shares of the clients are drawn from a symmetric Dirichlet distribution.

    Hsu, Qi and Brown, arXiv 1909.06335. Small ``alpha``: few labels a client; large: as IID. Drawn anew (ten times at
    most) while a client has fewer than ``min_samples``; then those clients get theirs from the largest ones.

    Raises:
        ConfigurationError: there are too few samples for that.
    """
    check_enough(len(labels), clients, min_samples)
    array = np.asarray(labels)
    for attempt in range(_TRIES):
        generator = np.random.default_rng([seed, attempt])
        parts: list[list[int]] = [[] for _ in range(clients)]
        for label in np.unique(array):
            members = generator.permutation(np.flatnonzero(array == label))
            ends = np.rint(np.cumsum(_shares(generator, clients, alpha)) * len(members)).astype(int)[:-1]
            for part, chosen in zip(parts, np.split(members, ends), strict=True):
                part.extend(chosen.tolist())
        if min(map(len, parts)) >= min_samples:
            return parts
    return _filled_up(parts, min_samples, generator)


def check_enough(samples: int, clients: int, min_samples: int = 1) -> None:
    """Raise :class:`ConfigurationError` where ``samples`` cannot give every client ``min_samples``."""
    if samples < clients * min_samples:
        least = "" if min_samples == 1 else f" with strategy.min_samples={min_samples}"
        most = samples // min_samples
        way_out = f"set strategy.clients to at most {most}" if most else "lower strategy.min_samples"
        raise ConfigurationError(f"{samples} samples cannot be divided among {clients} clients{least}: {way_out}.")


def _shares(generator: np.random.Generator, clients: int, alpha: float) -> np.ndarray:
    shares = generator.dirichlet(np.full(clients, alpha))
    if np.isfinite(shares).all():
        return shares
    # A tiny alpha underflows. Gamma(alpha) is Gamma(alpha + 1) times the 1/alpha-th power of a uniform number; as
    # logarithms these can be compared whatever their size.
    logs = alpha * np.log(generator.gamma(alpha + 1, size=clients)) + np.log1p(-generator.random(clients))
    with np.errstate(over="ignore"):
        weights = np.exp((logs - logs.max()) / alpha)
    return weights / weights.sum()


def _filled_up(parts: list[list[int]], min_samples: int, generator: np.random.Generator) -> list[list[int]]:
    """Every client with at least ``min_samples``: a sample after the other goes from the largest to the smallest."""
    while len(smallest := min(parts, key=len)) < min_samples:
        largest = max(parts, key=len)
        smallest.append(largest.pop(int(generator.integers(len(largest)))))
    return parts
