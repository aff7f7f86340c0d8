"""Every feature in three places, every place with several features."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch.distributed.pipelining  # noqa: F401  # before the workers are forked

from tests.strategies.features import FEATURES, PLACES, largest

with mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}):
    import deepspeed  # noqa: F401  # before the workers are forked: it takes seconds


def pairs() -> list[tuple[str, str]]:
    """Places that stand next to each other are kinds of one strategy: a feature takes some that are apart."""
    places, found = [*PLACES], []
    for number, feature in enumerate(FEATURES):
        able = [place for place in places if place not in FEATURES[feature].without]
        found += [(feature, able[(number + step) % len(able)]) for step in (0, 5, 11)]
    return found


@pytest.mark.parametrize(("feature", "place"), pairs())
def test_as_on_one_process(feature: str, place: str) -> None:
    found, bound = largest(feature, place)
    assert found < bound
