"""The rules for bringing gradients together, against their equations; and modules made equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.comm import aggregate_gradients, synchronize_model, world_communicator
from drivetrain.comm.communicator import CommunicationError, Communicator
from drivetrain.errors import ConfigurationError
from tests.distributed import run_ranks

Lists = list[list[torch.Tensor]]
RULES: list[dict[str, Any]] = [
    {"method": "synchronous"},
    {"method": "synchronous", "weights": [1.0, 3.0, 0.0]},
    {"method": "asynchronous", "staleness": [0, 1, 4]},
    {"method": "asynchronous", "staleness": [2, 0, 1], "power": 0.5, "weights": [2, 1, 1]},
    {"method": "elastic", "local": 0.25},
    {"method": "elastic", "local": 1.0, "weights": [1, 2, 3]},
]


def gradients(workers: int = 3) -> Lists:
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 3), (4,), ())]
        for _ in range(workers)
    ]


def expected(found: Lists, rule: dict[str, Any], rank: int) -> list[torch.Tensor]:
    """The equations, written once more in the plainest way."""
    weights = rule.get("weights", [1.0] * len(found))
    late = rule.get("staleness", [0] * len(found))
    discounts = [1 / (1 + s) ** rule.get("power", 1.0) for s in late]
    if rule["method"] != "asynchronous":
        discounts = [1.0] * len(found)
    result = []
    for number in range(len(found[0])):
        mean = sum(w * d * g[number] for w, d, g in zip(weights, discounts, found, strict=True)) / sum(weights)
        own = rule.get("local", 0.0) if rule["method"] == "elastic" else 0.0
        result.append(own * found[rank][number] + (1 - own) * mean)
    return result


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_rules_in_one_process(rule: dict[str, Any]) -> None:
    found = gradients()
    before = [[tensor.clone() for tensor in one] for one in found]
    for rank in range(3):
        together = aggregate_gradients(found, rank=rank, **rule)
        assert isinstance(together, list)
        torch.testing.assert_close(together, expected(found, rule, rank))
        named = aggregate_gradients([dict(zip("abc", one, strict=True)) for one in found], rank=rank, **rule)
        torch.testing.assert_close(named, dict(zip("abc", together, strict=True)))
    assert all(torch.equal(a, b) for one, two in zip(found, before, strict=True) for a, b in zip(one, two, strict=True))


def test_half_precision_is_added_in_full() -> None:
    # 256 + 1 is 256 in bf16: added one by one in bf16 the ones would vanish.
    found = [[torch.tensor([256.0], dtype=torch.bfloat16)], *[[torch.ones(1, dtype=torch.bfloat16)] for _ in range(7)]]
    [together] = aggregate_gradients(found)
    assert together.dtype == torch.bfloat16
    assert together.item() == torch.tensor(263 / 8, dtype=torch.bfloat16).item()


def on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    comm = world_communicator()
    found = gradients(world_size)
    result: dict[str, Any] = {}
    for number, rule in enumerate(RULES):
        mine = {key: value[rank] if isinstance(value, list) else value for key, value in rule.items()}
        together = aggregate_gradients(found[rank], communicator=comm, **mine)
        torch.testing.assert_close(together, expected(found, rule, rank), msg=f"rule {number}")
    half = aggregate_gradients({"w": torch.full((3,), rank + 1.0, dtype=torch.float16)}, communicator=comm)
    result["half"] = half["w"]  # type: ignore[call-overload]
    with pytest.raises(CommunicationError, match="no rank of group 'world' has a weight above zero"):
        aggregate_gradients(found[rank], communicator=comm, weights=0.0)

    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 3).double())
    module[2].weight = nn.Parameter(module[2].weight.t())  # not contiguous
    module.register_buffer("steps", torch.tensor(rank))
    module[1].running_mean.fill_(rank)  # type: ignore[operator, union-attr]
    held = module[0].weight
    synchronize_model(module, source=1)
    assert module[0].weight is held
    result["state"] = {name: value.detach().clone() for name, value in module.state_dict().items()}
    with pytest.raises(CommunicationError, match="rank 0 differs from that on rank 1 in bias, weight"):
        synchronize_model(nn.Linear(2, 3 if rank == 1 else 4), source=1)
    with pytest.raises(CommunicationError, match="source=3 is no rank"):
        synchronize_model(module, comm, source=3)
    return result


def test_on_real_ranks() -> None:
    results = run_ranks(on_ranks, 3)
    for one in results:
        assert one["half"].tolist() == [2.0] * 3 and one["half"].dtype == torch.float16
        assert one["state"].keys() == results[1]["state"].keys()
        assert all(torch.equal(value, results[1]["state"][name]) for name, value in one["state"].items())
    assert int(results[0]["state"]["steps"]) == 1
    assert results[0]["state"]["1.running_mean"].tolist() == [1.0] * 3


def test_one_rank_alone() -> None:
    module = nn.Linear(2, 2)
    before = module.weight.detach().clone()
    synchronize_model(module)
    assert torch.equal(before, module.weight)
    assert world_communicator().world_size == 1
    [same] = aggregate_gradients([torch.ones(2)], communicator=Communicator())
    assert same.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"method": "asynchron"}, "did you mean 'asynchronous'"),
        ({"weights": [1.0]}, "1 weights for 2 workers"),
        ({"weights": [0.0, 0.0]}, "no worker has a weight above zero"),
        ({"weights": [1.0, -1.0]}, "weight of worker 1 is -1"),
        ({"method": "asynchronous", "staleness": -1}, "staleness of worker 0 is -1"),
        ({"method": "elastic", "local": 2.0}, "local=2.0"),
        ({"rank": 2}, "rank=2 is none of 2 workers"),
        ({"gradients": [[torch.ones(2)], [torch.ones(3)]]}, "worker 1 differ"),
        ({"gradients": [[torch.ones(2)], [None]]}, "gradient 0 of worker 1 is NoneType"),
        ({"gradients": [torch.ones(2)], "communicator": Communicator(), "weights": [1.0]}, "those of this rank"),
        ({"gradients": None}, "gradients are a NoneType"),
        ({"gradients": {"a": [torch.ones(1)]}}, "gradients are a dict"),
        ({"weights": "ab"}, "weights='ab'"),
        ({"weights": ["a", "b"]}, "weight of worker 0 is 'a'"),
        ({"staleness": [0.5, 1], "method": "asynchronous"}, "staleness of worker 0 is 0.5"),
        ({"staleness": "ab", "method": "asynchronous"}, "staleness='ab'"),
        ({"power": "x"}, "power=x must be"),
        ({"power": float("inf")}, "power=inf must be"),
        ({"rank": "0", "method": "elastic"}, "rank=0 is none"),
    ],
)
def test_what_has_no_meaning_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        aggregate_gradients(**{"gradients": [[torch.ones(2)], [torch.ones(2)]], **change})


def test_what_is_too_late_counts_nothing() -> None:
    pair = [[torch.ones(1)], [torch.ones(1)]]
    for staleness, power in (([0, 10**400], 1.0), ([0, 1], 1e308)):
        (found,) = aggregate_gradients(pair, "asynchronous", staleness=staleness, power=power)
        assert found.item() == 0.5
