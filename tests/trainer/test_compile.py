"""torch.compile under every strategy that declares it: the same run, and the module as it was afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from drivetrain import Trainer
from drivetrain.compilation import compiled
from drivetrain.errors import ConfigurationError
from tests.runs import QUIET, Classifier, difference, train


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2), ("ring", 2)])
def test_the_same_run(strategy: str, devices: int) -> None:
    run = train(strategy=strategy, devices=devices, compile="aot_eager", accumulate_grad_batches=2)
    assert max(difference(train(accumulate_grad_batches=2), run).values()) < 1e-10


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.ones_(nn.Linear(1, 1).weight))

    def forward(self, x: Any) -> Any:
        return x * self.weight


def test_networks_are_compiled_and_restored() -> None:
    module = nn.Module()
    module.net = Counts()
    module.parts = nn.ModuleList([Counts(), nn.Tanh()])
    names = list(module.state_dict())
    with compiled(module, "eager"):
        assert module.net._compiled_call_impl is not None
        assert module.parts[0]._compiled_call_impl is not None
        assert list(module.state_dict()) == names
    assert module.net._compiled_call_impl is None
    with compiled(module, False):
        assert module.net._compiled_call_impl is None


def test_a_backend_that_there_is_not() -> None:
    with pytest.raises(ConfigurationError, match=r"compile='inductr'.*'inductor'"):
        Trainer(compile="inductr", **QUIET)


def test_a_compiled_run_leaves_the_callers_module_alone() -> None:
    module = train(Classifier, compile="eager", max_epochs=1).module
    assert module.net._compiled_call_impl is None
