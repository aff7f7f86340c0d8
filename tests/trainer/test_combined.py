"""Loaders that are read at once: streams among them end where they end, and unlike parts are told of."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.combined import CombinedLoader
from drivetrain.combined_source import training_source
from drivetrain.strategy import Shard
from tests.runs import Classifier, dataset, difference, loader, train


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        x, y = dataset(12).tensors
        return iter(list(zip(x, y, strict=True)))


class OfBoth(Classifier):
    """A mean over the samples of whatever is there."""

    def loss(self, batch: Any) -> torch.Tensor:
        given = [one for one in (batch.values() if isinstance(batch, dict) else [batch]) if one is not None]
        x, y = (torch.cat(parts) for parts in zip(*given, strict=True))
        return torch.nn.functional.cross_entropy(self.net(x), y)


# Three batches of the stream, five of the other.
STEPS = {
    ("min_size", None): 3,
    ("min_size", 2): 2,
    ("min_size", 4): 3,
    ("max_size", 4): 4,
    ("max_size", 9): 5,
    ("max_size_cycle", 9): 5,
    ("sequential", 4): 7,
    ("sequential", None): 8,
}


@pytest.mark.parametrize(("mode", "limit"), STEPS)
def test_a_stream_among_them_may_end_before_the_limit(mode: str, limit: int | None) -> None:
    def run(strategy: str, devices: int) -> Any:
        data = CombinedLoader({"stream": DataLoader(Stream(), batch_size=4), "known": loader(20, 4, False)}, mode)
        return train(OfBoth, strategy, devices, data=data, max_epochs=2, limit_train_batches=limit)

    one = run("single", 1)
    assert one.steps == 2 * STEPS[mode, limit]
    assert max(difference(one, run("ddp", 2)).values()) < 1e-10


@pytest.mark.parametrize(("sizes", "unlike"), [((4, 4), False), ((6, 4), False), ((4, 3), True), ((5, 3), True)])
def test_unlike_parts_are_told_of_once(sizes: tuple[int, int], unlike: bool) -> None:
    loaders = {str(size): loader(3 * size, size, False) for size in sizes}
    source = training_source(loaders, shard=Shard(0, 2), mode="global", seed=1, training=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert len(list(source)) == 3
    about = [str(one.message) for one in told if "read at once" in str(one.message)]
    assert len(about) == unlike, about
    assert not unlike or "not quite the loss of one process" in about[0]


def test_a_combined_loader_that_is_being_read_can_be_copied() -> None:
    combined = CombinedLoader([range(3), range(2)], "sequential")
    assert next(iter(combined)) == (0, 0, 0)
    for copied in (copy.deepcopy(combined), pickle.loads(pickle.dumps(combined))):
        assert [batch for batch, _, _ in copied] == [0, 1, 2, 0, 1]
    assert next(combined) == (1, 1, 0)
