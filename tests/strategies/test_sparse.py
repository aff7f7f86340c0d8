"""Embeddings with sparse gradients: trained as under ``single``, or refused before any worker starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.errors import ConfigurationError
from tests.runs import Classifier, difference, seeded, train


class Looked(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.table = seeded(lambda: nn.Embedding(5, 6, sparse=True))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x + self.table(y)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


REFUSED: list[tuple[Any, int, dict[str, Any]]] = [
    ("ring", 2, {}),
    ("ddp", 2, {"compression": "fp16"}),
    ("fsdp", 2, {}),
    ("zero", 2, {"precision": "32-true"}),
    ("parameter_server", 2, {}),
    ({"name": "local_sgd", "period": 1}, 2, {}),
    ({"name": "elastic_averaging", "mix": "gradients", "local": 0.0}, 2, {}),
]


@pytest.mark.parametrize(("strategy", "devices", "options"), REFUSED, ids=str)
def test_what_sums_flat_numbers_refuses_them(strategy: Any, devices: int, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"table has sparse gradients .* sparse=False, or use strategy=ddp"):
        train(Looked, strategy, devices, **options)


def test_the_backends_own_sum_takes_them() -> None:
    assert max(difference(train(Looked), train(Looked, "ddp", 2)).values()) < 1e-10


def test_a_frozen_one_has_no_gradients() -> None:
    def make() -> Looked:
        module = Looked()
        module.table.requires_grad_(False)
        return module

    assert max(difference(train(make), train(make, "ring", 2)).values()) < 1e-10
