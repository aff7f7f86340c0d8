"""Partitions are disjoint, complete and repeatable; labels are found where a data set has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from drivetrain.errors import ConfigurationError
from drivetrain_plugins.federated.labels import labels_of
from drivetrain_plugins.federated.partition import dirichlet, iid
from drivetrain_plugins.federated.sampling import local_windows, sample_clients

LABELS = [i % 5 for i in range(500)]


def _is_partition(parts: list[list[int]], samples: int) -> bool:
    return sorted(index for part in parts for index in part) == list(range(samples))


def _skew(parts: list[list[int]]) -> float:
    """Mean total variation between a client's labels and the even distribution of all."""
    shares = [np.bincount([LABELS[i] for i in part], minlength=5) / len(part) for part in parts]
    return float(np.mean([np.abs(share - 0.2).sum() / 2 for share in shares]))


def test_iid_is_an_even_split() -> None:
    parts = iid(51, 4, 3)
    assert _is_partition(parts, 51)
    assert sorted(map(len, parts)) == [12, 13, 13, 13]
    assert parts == iid(51, 4, 3) != iid(51, 4, 4)


def test_dirichlet_skews_labels_the_more_the_smaller_alpha() -> None:
    parts = {alpha: dirichlet(LABELS, 8, alpha, 1) for alpha in (0.1, 1.0, 1000.0)}
    assert all(_is_partition(part, 500) for part in parts.values())
    assert parts[1.0] == dirichlet(LABELS, 8, 1.0, 1) != dirichlet(LABELS, 8, 1.0, 2)
    assert _skew(parts[0.1]) > _skew(parts[1.0]) + 0.1 > _skew(parts[1000.0]) + 0.1
    assert _skew(parts[1000.0]) < 0.03


@pytest.mark.parametrize(
    ("labels", "clients", "alpha", "least"),
    [
        (LABELS, 100, 0.01, 5),
        (LABELS, 100, 1e-6, 3),
        (LABELS, 40, 1e-300, 1),
        ([0, 1, 2] * 4, 10, 0.05, 1),
        ([7] * 12, 12, 1.0, 1),
    ],
)
def test_dirichlet_gives_every_client_its_samples(labels: list[int], clients: int, alpha: float, least: int) -> None:
    """Whatever is drawn: no draw gives a hundred clients of alpha 0.01 five samples each."""
    parts = dirichlet(labels, clients, alpha, 1, least)
    assert _is_partition(parts, len(labels)) and len(parts) == clients
    assert min(map(len, parts)) >= least
    assert parts == dirichlet(labels, clients, alpha, 1, least)


@pytest.mark.parametrize(
    ("least", "said"), [(1, "at most 500"), (2, "min_samples=2: set strategy.clients to at most 250"), (501, "lower")]
)
def test_too_few_samples_in_one_sentence(least: int, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        dirichlet(LABELS, 501, 1.0, 1, least)


class Pairs(Dataset[Any]):
    def __init__(self, second: Any) -> None:
        self.second = second

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return index, self.second[index]


def labels_from_here(dataset: Any) -> list[int]:
    return [value * 10 for value in dataset.second]


def test_labels_are_found() -> None:
    tensors = TensorDataset(torch.zeros(4, 2), torch.tensor([7, 3, 7, 5]))
    pairs = Pairs([1, 0, 0, 1])
    assert labels_of(tensors) == [2, 0, 2, 1]
    assert labels_of(Subset(tensors, [3, 0])) == [0, 1]
    assert labels_of(pairs) == labels_of(pairs, "second") == [1, 0, 0, 1]
    assert labels_of(pairs, f"{__name__}:labels_from_here") == [1, 0, 0, 1]
    pairs.targets = [2, 2, 2, 1]  # type: ignore[attr-defined]
    assert labels_of(pairs) == [1, 1, 1, 0]


@pytest.mark.parametrize("where", ["third", "json:nothing", "no_such_module:f"])
def test_labels_that_are_not_there(where: str) -> None:
    with pytest.raises(ConfigurationError, match="name an attribute of Pairs"):
        labels_of(Pairs([0, 1, 0, 1]), where)


def test_samples_without_a_single_label() -> None:
    with pytest.raises(ConfigurationError, match="partition=iid"):
        labels_of(Pairs(torch.zeros(4, 3)))
    with pytest.raises(ConfigurationError, match="partition=iid"):
        labels_of(TensorDataset(torch.zeros(4, 3), torch.zeros(4, 3)))


def test_clients_are_drawn_evenly_and_repeatably() -> None:
    rounds = [sample_clients(10, 3, 1, number) for number in range(2000)]
    assert rounds[5] == sample_clients(10, 3, 1, 5)
    assert all(len(set(chosen)) == 3 for chosen in rounds)
    counts = np.bincount([client for chosen in rounds for client in chosen], minlength=10)
    assert np.abs(counts - 600).max() < 4 * (600 * 0.7) ** 0.5


def test_local_steps_and_epochs() -> None:
    options: dict[str, Any] = {"batch_size": 4, "accumulate": 2, "drop_last": False, "key": (1, 2, 3), "limit": None}
    samples = list(range(100, 111))
    two = local_windows(samples, shuffle=True, epochs=2, steps=None, **options)
    assert [[len(batch) for batch in window] for window in two] == [[4, 4], [3], [4, 4], [3]]
    passes = [[i for window in part for batch in window for i in batch] for part in (two[:2], two[2:])]
    assert sorted(passes[0]) == sorted(passes[1]) == samples and passes[0] != passes[1]
    assert local_windows(samples, shuffle=True, epochs=1, steps=3, **options) == two[:3]
    assert local_windows(samples, shuffle=False, epochs=1, steps=1, **options) == [[samples[:4], samples[4:8]]]
    options |= {"drop_last": True, "limit": 1}
    assert local_windows(samples[:3], shuffle=False, epochs=1, steps=None, **options) == [[samples[:3]]]
    for limit, batches in ((1.0, 2), (0.5, 1), (0.1, 1)):  # of two whole ones
        found = local_windows(samples, shuffle=False, epochs=1, steps=None, **{**options, "limit": limit})
        assert sum(map(len, found)) == batches
