"""Ranks that compute each batch together count it once, whatever gives the batches, and must have read the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.batch_fingerprint import fingerprint
from drivetrain.errors import WorkerError
from tests.runs import Classifier, dataset, difference, train

TENSOR = {"name": "mesh", "data": 2, "shard": 1, "tensor": 2}
CUT = {"name": "mesh", "data": 1, "shard": 2, "tensor": 2}
PIPELINE = {"name": "mesh", "data": 2, "pipeline": 2}


class Planned(Classifier):
    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"net.0": "columns", "net.2": "rows"}


class Several(Planned):
    """Its batches come from loaders that are read at once."""

    def loss(self, batch: Any) -> torch.Tensor:
        (x, first), (more, second) = batch["a"], batch["b"]
        return nn.functional.cross_entropy(self.net(torch.cat([x, more])), torch.cat([first, second]))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("strategy", "devices"), [(TENSOR, 4), (CUT, 4), (PIPELINE, 4), ("tensor_parallel", 2)])
def test_batches_of_several_loaders_weigh_what_they_weigh_in_one_process(
    strategy: Any, devices: int, accumulate: int
) -> None:
    """The samples of a tensor group's ranks were added up: gradients were half of what they should have been."""

    def run(place: Any, count: int) -> Any:
        data = dataset(47)
        loaders = {"a": DataLoader(data, batch_size=8, shuffle=True), "b": DataLoader(data, batch_size=8)}
        return train(Several, place, count, data=loaders, accumulate_grad_batches=accumulate)

    assert max(difference(run("single", 1), run(strategy, devices)).values()) < 1e-10


class SplitByRank(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        samples = dataset(48)
        return iter([samples[index] for index in range(dist.get_rank(), len(samples), dist.get_world_size())])


@pytest.mark.parametrize(
    ("strategy", "devices", "options"),
    [("tensor_parallel", 2, {}), ("pipeline", 2, {}), (TENSOR, 4, {"batch": "per_process"})],
)
def test_a_stream_split_by_rank_is_no_batch_of_ranks_that_compute_together(
    strategy: Any, devices: int, options: dict[str, Any]
) -> None:
    with pytest.raises(WorkerError, match=r"ranks \d and \d compute each batch together and read different ones"):
        train(Planned, strategy, devices, data=DataLoader(SplitByRank(), batch_size=4), **options)


class Sparse(Planned):
    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((batch[0].to_dense(), batch[1]))


def test_batches_of_sparse_tensors_are_looked_at() -> None:
    """Which cannot be laid out in a row, and ended the run where they should have been compared."""
    runs = []
    for place, count in (("single", 1), ("tensor_parallel", 2)):
        samples = DataLoader(dataset(48), batch_size=8, collate_fn=_sparse)
        runs.append(train(Sparse, place, count, data=samples))
    assert max(difference(*runs).values()) < 1e-10


def _sparse(samples: Any) -> Any:
    x, y = zip(*samples, strict=True)
    return torch.stack(x).to_sparse(), torch.stack(y)


def test_tensors_of_any_layout_have_a_fingerprint() -> None:
    rows = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    kinds = [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: x.to_sparse_bsr((1, 1)),
        lambda x: x.to_sparse_bsc((1, 1)),
        lambda x: x.to_mkldnn(),
        lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    ]
    for kind in kinds:
        assert fingerprint({"x": kind(rows)}) == fingerprint({"x": kind(rows)}) != fingerprint({"x": kind(rows.T)})


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 4), ("fsdp", 4), (TENSOR, 4)])
def test_a_tail_of_several_loaders_that_all_ranks_have_counts_once(
    strategy: Any, devices: int, accumulate: int
) -> None:
    """Fewer samples than ranks are everybody's; those of several loaders counted as often as there are ranks."""

    def run(place: Any, count: int) -> Any:
        data = dataset(49 if strategy is TENSOR else 51)
        loaders = {name: DataLoader(data, batch_size=8, shuffle=True) for name in "ab"}
        return train(Several, place, count, data=loaders, accumulate_grad_batches=accumulate)

    assert max(difference(run("single", 1), run(strategy, devices)).values()) < 1e-10


@pytest.mark.filterwarnings("error")
def test_any_values_have_a_fingerprint() -> None:
    """A run does not end for what its ranks are compared by, and neighbours among large numbers differ."""
    assert fingerprint([10**400]) != fingerprint([10**400 + 1])
    assert fingerprint(torch.tensor([2**62, 5])) != fingerprint(torch.tensor([2**62 + 1, 5]))
    assert fingerprint(np.array([2**63], dtype=np.uint64)) != fingerprint(np.array([2**63 + 1], dtype=np.uint64))
    assert fingerprint([np.complex64(1j)]) != fingerprint([np.complex64(2j)])
    assert fingerprint(torch.tensor([1j]).conj()) != fingerprint(torch.tensor([1j]))
    assert fingerprint([np.timedelta64(5, "D"), torch.zeros(2, device="meta"), "text", None]) == 0.0
    short = torch.ones(2, dtype=torch.uint8)
    assert fingerprint(short.view(torch.float8_e4m3fn)) == fingerprint(short.view(torch.bits8))
    long = torch.ones(2**18 + 2)
    assert fingerprint(long) == len(long) * (len(long) + 1) / 2
