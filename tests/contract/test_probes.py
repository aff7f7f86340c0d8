"""Three families that bend the contract most run through the unchanged loops to single's result."""

from __future__ import annotations

import os
from functools import cache

import pytest

from tests.contract.parameter_server import PARAMETER_SERVER
from tests.contract.pipeline import PIPELINE
from tests.contract.zero import ZERO
from tests.runs import Outcome, difference, loader, train

OPTIONS = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


@cache
def _reference(precision: str = "64-true") -> Outcome:
    return train(validation=loader(23, 5, shuffle=False), precision=precision, **OPTIONS)


def test_a_pipeline_with_an_uneven_last_batch() -> None:
    found = difference(_reference(), train(strategy=PIPELINE, devices=2, validation=loader(23, 5, False), **OPTIONS))
    assert max(found.values()) < 1e-10


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_parameter_server_that_never_sees_a_batch(devices: int) -> None:
    run = train(strategy=PARAMETER_SERVER, devices=devices, validation=loader(23, 5, False), **OPTIONS)
    assert max(difference(_reference(), run).values()) < 1e-10


def test_deepspeed_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "DS_ACCELERATOR", "cpu")
    reference = _reference("32-true")
    run = train(strategy=ZERO, devices=2, validation=loader(23, 5, False), precision="32-true", **OPTIONS)
    assert max(difference(reference, run).values()) < 1e-6
