"""Parameters that training comes to later: those that the step itself thaws, whose first gradients no bucket of DDP has
a place for, and groups that an optimizer is given on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain.errors import WorkerError
from tests.runs import Classifier, difference, train


class Thaws(Classifier):
    """Frozen in part until the step of the fourth batch, which thaws it before its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            self.net[0].requires_grad_(True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 2), ("ring", 3)])
def test_what_the_step_thaws_is_averaged_at_once(strategy: str, devices: int, window: int) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": window, "gradient_clip_val": 0.5}
    run = train(Thaws, strategy, devices, **options)
    alone = train(Thaws, **options)
    assert max(difference(alone, run).values()) < 1e-10


class Grows(Classifier):
    """The optimizer is given the first layer after an epoch."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2:].parameters(), lr=0.1, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.optimizers().add_param_group({"params": list(self.net[0].parameters()), "lr": 0.05})


@pytest.mark.parametrize(
    "strategy", ["ddp", {"name": "local_sgd", "period": 1}, {"name": "gossip", "graph": "full"}], ids=str
)
def test_a_group_that_is_added_trains_where_nothing_is_kept_for_each(strategy: Any) -> None:
    assert max(difference(train(Grows), train(Grows, strategy, 3)).values()) < 1e-10


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "local_sgd", "period": 2, "outer": "nesterov"},
        {"name": "elastic_averaging", "period": 2},
        {"name": "parameter_server"},
        {"name": "parameter_server", "embedded": True, "mode": "async"},
    ],
    ids=str,
)
def test_elsewhere_it_is_refused_in_a_sentence(strategy: Any) -> None:
    with pytest.raises(WorkerError, match="SGD was given a group of parameters while strategy="):
        train(Grows, strategy, 2)
