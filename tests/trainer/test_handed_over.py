"""What a script asks of a Trainer whose workers have ended, and whose own strategy never held the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain.errors import MisuseError
from tests.runs import train

STRATEGIES = ["ddp", "local_sgd", "gossip", {"name": "federated", "clients": 2}, "parameter_server"]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_whole_weights_are_those_given_back(strategy: Any) -> None:
    run = train(strategy=strategy, devices=2, max_epochs=1)
    held = run.trainer.full_weights()
    assert held.keys() == run.weights.keys()
    assert all(torch.equal(held[name], value) for name, value in run.weights.items())
    with pytest.raises(MisuseError, match="the run's workers have ended"):
        run.trainer.run_summary()
