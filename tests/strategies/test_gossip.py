"""Gossip: the full graph is exact; every exchange keeps the mean and brings the replicas nearer to it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.comm.communicator import Communicator
from drivetrain.errors import ConfigurationError
from drivetrain_plugins.strategies.declared.gossip import is_connected, mixing_matrix, sources
from drivetrain_plugins.strategies.gossip import Neighbourhood
from tests.distributed import run_ranks
from tests.resume.runs import assert_same, fit, noisy_loader
from tests.runs import Classifier, difference, train
from tests.strategies.parity import check_parity

STAR = [[0, 1], [0, 2], [0, 3]]


def gossip(**options: Any) -> dict[str, Any]:
    return {"name": "gossip", **options}


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_the_full_graph_is_single(devices: int) -> None:
    check_parity(gossip(graph="full"), devices)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("graph", ["ring", "exponential", "full"])
@pytest.mark.parametrize("weights", ["metropolis", "uniform"])
def test_weights_are_doubly_stochastic(graph: str, weights: str, size: int) -> None:
    heard = sources(graph, [], size)
    matrix = np.array(mixing_matrix(heard, weights))
    assert is_connected(heard)
    assert (matrix >= -1e-15).all()
    assert np.abs(matrix.sum(0) - 1).max() < 1e-14
    assert np.abs(matrix.sum(1) - 1).max() < 1e-14
    if graph == "full":
        assert np.abs(matrix - 1 / size).max() < 1e-15


def test_the_gap_of_a_ring_of_eight_is_the_known_one() -> None:
    singular = np.linalg.svd(np.array(mixing_matrix(sources("ring", [], 8), "uniform")), compute_uv=False)
    assert abs(singular[1] - 0.8047) < 1e-4


@pytest.mark.parametrize(
    ("graph", "edges", "size"), [("ring", [], 4), ("exponential", [], 3), ("edges", STAR, 4), ("full", [], 2)]
)
def test_an_exchange_keeps_the_mean_and_shrinks_the_distance(graph: str, edges: list[list[int]], size: int) -> None:
    heard = sources(graph, edges, size)
    matrix = torch.tensor(mixing_matrix(heard, "metropolis"), dtype=torch.float64)
    gap = float(torch.linalg.svdvals(matrix)[1]) if size > 1 else 0.0

    def exchange(rank: int, world_size: int) -> list[torch.Tensor]:
        communicator = Communicator(torch.distributed.group.WORLD)
        neighbourhood = Neighbourhood(heard, "metropolis", communicator)
        generator = torch.Generator().manual_seed(rank)
        tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(3, 5), (7,)]]
        seen = []
        for _ in range(4):
            seen.append(torch.cat([t.reshape(-1) for t in tensors]))
            neighbourhood.mix(tensors)
        assert neighbourhood.bytes_sent == 4 * 22 * 8 * len(neighbourhood.hearers)
        return [*seen, torch.cat([t.reshape(-1) for t in tensors])]

    rounds = [torch.stack(ranks) for ranks in zip(*run_ranks(exchange, size), strict=True)]
    for before, after in pairwise(rounds):
        assert float((after - matrix @ before).abs().max()) < 1e-14
        assert float((after.mean(0) - before.mean(0)).abs().max()) < 1e-12
        assert float((after - after.mean(0)).norm()) <= gap * float((before - before.mean(0)).norm()) + 1e-12
        assert gap < 1


def test_on_the_full_graph_mixing_weights_is_exact_for_sgd() -> None:
    """A complete graph given as edges takes the way of the weights."""
    edges = [[0, 1], [0, 2], [1, 2]]
    found = difference(train(Classifier), train(Classifier, gossip(graph="edges", edges=edges), 3))
    assert max(found.values()) < 1e-10


@pytest.mark.parametrize("options", [{"graph": "ring"}, {"graph": "edges", "edges": STAR, "period": 2}])
def test_the_mean_of_the_replicas_follows_single(options: dict[str, Any]) -> None:
    """At the first step all replicas are at one place, so under SGD their mean is single's; later it stays near."""
    one = {"max_steps": 1}
    assert max(difference(train(Classifier, **one), train(Classifier, gossip(**options), 4, **one)).values()) < 1e-12
    later = difference(train(Classifier), train(Classifier, gossip(**options), 4))
    assert 1e-9 < later["weights"] < 0.1


def test_resumed_to_the_same_bits(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"strategy": {"name": "decentralized", "period": 2}, "devices": 3}
    whole = fit(tmp_path / "whole", "batch", **settings)
    resumed = fit(tmp_path / "again", data=noisy_loader(), resume=whole / "3-batch-0.ckpt", **settings)
    assert_same(whole, resumed, 3, best=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"graph": "star"}, "ring, exponential, full, edges"),
        ({"graph": "edges", "edges": [[0, 1], [2, 3]]}, "does not connect the 4 workers"),
        ({"graph": "edges", "edges": [[0, 4]]}, "from 0 to 3"),
        ({"edges": [[0, 1]]}, "graph=edges"),
        ({"graph": "edges", "edges": STAR, "weights": "uniform"}, "weights=metropolis"),
        ({"weights": "even"}, "metropolis, uniform"),
        ({"period": 0}, "at least 1"),
    ],
)
def test_options_out_of_range_are_refused_before_launch(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        train(Classifier, gossip(**options), 4)
