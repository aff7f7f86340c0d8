"""Fixed parts of a data set: nothing twice, nothing lost, sizes as promised."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

import drivetrain
from drivetrain.data import DataPartitioner
from drivetrain.data_partition import Method
from drivetrain.errors import ConfigurationError
from drivetrain.sharding import part
from drivetrain.strategy import Shard


@settings(max_examples=150)
@given(
    samples=st.integers(0, 400),
    method=st.sampled_from(get_args(Method)),
    speeds=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
)
def test_every_partition_is_disjoint_complete_and_of_its_sizes(
    samples: int, method: Method, speeds: list[float], shuffle: bool, seed: int
) -> None:
    workers = len(speeds)
    weights = speeds if method == "weighted" else None
    cut = DataPartitioner(range(samples), workers, method, speeds=weights, shuffle=shuffle, seed=seed)
    parts = [cut.get_indices(rank) for rank in range(workers)]
    assert sorted(index for one in parts for index in one) == list(range(samples))
    sizes = [cut.partition_size(rank) for rank in range(workers)]
    assert sizes == [len(one) for one in parts]
    exact = [Fraction(speed) for speed in speeds]
    if method == "weighted":
        assert all(abs(size - samples * speed / sum(exact)) < 1 for size, speed in zip(sizes, exact, strict=True))
    else:
        assert max(sizes) - min(sizes) <= 1
    again = DataPartitioner(range(samples), workers, method, speeds=weights, shuffle=shuffle, seed=seed)
    assert [again.get_indices(rank) for rank in range(workers)] == parts


def test_which_samples_go_together() -> None:
    contiguous = DataPartitioner(range(10), 3)
    assert [contiguous.get_indices(rank) for rank in range(3)] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    strided = DataPartitioner(range(10), 3, "strided")
    assert [strided.get_indices(rank) for rank in range(3)] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    weighted = DataPartitioner(range(10), 3, "weighted", speeds=[1, 1, 2.5])
    assert [weighted.partition_size(rank) for rank in range(3)] == [2, 2, 6]
    for total in range(12):  # as the Trainer cuts a batch
        cut = DataPartitioner(range(total), 5)
        mine = [part(total, Shard(rank, 5), whole_tail=False)[0] for rank in range(5)]
        assert [cut.get_indices(rank) for rank in range(5)] == [list(range(total))[one] for one in mine]


def test_shuffled_parts_depend_on_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = (DataPartitioner(range(100), 2, shuffle=True, seed=seed) for seed in (1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert first.get_indices(0) != second.get_indices(0)
    assert first.get_indices(0) != list(range(50))


def test_a_part_is_a_data_set() -> None:
    features = torch.arange(7.0)
    cut = drivetrain.DataPartitioner(TensorDataset(features), 2, "strided")
    subset = cut.get_partition(1)
    assert [float(subset[i][0]) for i in range(len(subset))] == [1.0, 3.0, 5.0]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((range(3), 0), "workers=0"),
        ((range(3), 2, "striped"), "did you mean 'strided'"),
        ((range(3), 2, "weighted"), "speeds go with"),
        ((Stream(), 2), "Stream cannot be cut"),
        (({1, 2, 3}, 2), "set cannot be cut"),
        (({"a": 1}, 2), "dict cannot be cut"),
        ((range(3), 2.0), "workers=2.0"),
        ((range(3), "2"), "workers='2'"),
        ((range(3), 2, None), "there is no partition None"),
    ],
)
def test_what_cannot_be_cut_is_refused(arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        DataPartitioner(*arguments)


def test_speeds_and_ranks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="1 speeds for 2 workers"):
        DataPartitioner(range(3), 2, "weighted", speeds=[1])
    with pytest.raises(ConfigurationError, match="speed of worker 1 is 0"):
        DataPartitioner(range(3), 2, "weighted", speeds=[1, 0])
    with pytest.raises(ConfigurationError, match="rank=-1 has no part"):
        DataPartitioner(range(3), 2).get_indices(-1)
    for rank in ("0", 0.5, True, None):
        with pytest.raises(ConfigurationError, match="has no part"):
            DataPartitioner(range(3), 2).get_indices(rank)  # type: ignore[arg-type]
    for speeds, said in (
        (3, "give a list"),
        ("ab", "give a list"),
        (["a", 1], "speed of worker 0"),
        ({0: 1}, "a list"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            DataPartitioner(range(3), 2, "weighted", speeds=speeds)  # type: ignore[arg-type]
    for seed in ("x", None, 2**70):
        with pytest.raises(ConfigurationError, match="give a whole number"):
            DataPartitioner(range(3), 2, shuffle=True, seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("speeds", [np.array([1, 3], np.float32), torch.tensor([1.0, 3.0]), np.array([1, 3])])
def test_speeds_that_were_measured(speeds: Any) -> None:
    cut = DataPartitioner(range(8), 2, "weighted", speeds=speeds)
    assert [cut.partition_size(rank) for rank in range(2)] == [2, 6]
