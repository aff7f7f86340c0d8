"""What a script asks of a Trainer whose workers have ended, and whose own strategy never held the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics

from drivetrain import Trainer
from drivetrain.errors import MisuseError, WorkerError
from tests.runs import QUIET, Classifier, loader, train

STRATEGIES = ["ddp", "local_sgd", "gossip", {"name": "federated", "clients": 2}, "parameter_server"]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_whole_weights_are_those_given_back(strategy: Any) -> None:
    run = train(strategy=strategy, devices=2, max_epochs=1)
    held = run.trainer.full_weights()
    assert held.keys() == run.weights.keys()
    assert all(torch.equal(held[name], value) for name, value in run.weights.items())
    with pytest.raises(MisuseError, match="the run's workers have ended"):
        run.trainer.run_summary()


class Gathers(Classifier):
    """Keeps a metric over the whole fit."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        return loss


def test_what_stands_for_the_loop_counts_and_what_was_left_with_the_workers_is_told() -> None:
    with pytest.warns(UserWarning, match="what the metrics mean of Gathers gathered was left with the workers"):
        trainer = train(Gathers, strategy="ddp", devices=2, max_epochs=2).trainer
    progress = trainer.fit_loop.epoch_loop.batch_progress
    assert (progress.current.completed, progress.total.completed, progress.is_last_batch) == (7, 14, True)
    assert trainer.fit_loop.epoch_progress.current.completed == 2
    with pytest.warns(UserWarning, match="trainer.optimizers is empty, since the workers that trained have ended"):
        assert trainer.optimizers == trainer.lightning_module.optimizers() == []
    with pytest.warns(UserWarning, match="trainer.lr_scheduler_configs is empty"):
        assert trainer.lr_scheduler_configs == []


class Refuses(Classifier):
    def on_train_start(self) -> None:
        raise ValueError("of the project's code")


@pytest.mark.parametrize("devices", [1, 2])
def test_a_trainer_knows_that_its_workers_failed(devices: int) -> None:
    """As one whose only worker is this process: scripts that catch the error ask it."""
    trainer = Trainer(strategy="ddp", devices=devices, **QUIET)
    with pytest.raises((ValueError, WorkerError)):
        trainer.fit(Refuses(), loader())
    assert (trainer.status, trainer.interrupted, trainer.state.fn) == ("failed", True, "fit")
