"""What a parameter server does with skipped steps, on some workers or all, and what it says of staleness."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import drivetrain.lightning as L
from drivetrain import Callback, Trainer, TrainModule
from drivetrain.errors import WorkerError
from tests.patience import SOON
from tests.runs import QUIET, Classifier, difference, train


def server(**options: Any) -> dict[str, Any]:
    return {"name": "parameter_server", **options}


class OneRankSkips(Classifier):
    """The last worker has no loss in batch 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        strategy = self.trainer.strategy
        if batch_idx == 1 and strategy.data.rank == strategy.data.size - 1:
            return None
        return super().training_step(batch, batch_idx)


class Explodes(Classifier):
    """A finite loss whose gradient is not, in batch 2."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            zero = (self.net[0].bias * 0.0).sum()
            return loss + zero.abs().sqrt()  # the derivative of the root at zero is infinite, times 0
        return loss


@pytest.mark.parametrize("options", [{}, {"embedded": True}], ids=str)
@pytest.mark.filterwarnings("ignore:step")
def test_a_step_that_is_not_finite_is_skipped_as_single_does(options: dict[str, Any]) -> None:
    settings = {"nonfinite": "skip", "gradient_clip_val": 0.5, "max_epochs": 2}
    reference, run = train(Explodes, **settings), train(Explodes, server(**options), 2, **settings)
    assert reference.steps == 12  # of 14
    assert difference(reference, run)["weights"] < 1e-10


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("make", [OneRankSkips, Explodes])
def test_async_workers_stay_together_where_one_skips(make: Any) -> None:
    """Epochs, log boundaries and schedules are counted in steps, which must be as many on all workers."""
    run = train(make, server(mode="async", embedded=True), 2, nonfinite="skip", log_every_n_steps=2)
    assert run.steps == train().steps
    assert all(torch.isfinite(value).all() for value in run.weights.values())


class Slope(TrainModule):
    """A gradient of one, whatever the batch and the weights: any order of pushes comes to the same."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.weighted = weighted

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.x * batch).mean()
        return {"loss": loss, "weight": 5.0 * len(batch)} if self.weighted else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_an_async_push_is_the_mean_of_its_workers_part_also_where_losses_weigh(weighted: bool, devices: int) -> None:
    """20 samples in batches of 6: the last one has fewer than there are workers."""
    data = DataLoader(torch.ones(20, dtype=torch.float64), batch_size=6)
    run = train(lambda: Slope(weighted), server(mode="async", embedded=True), devices, data=data, max_epochs=1)
    assert float(run.weights["x"]) == pytest.approx(-4.0 * devices, abs=1e-12)


class Tells(Callback):
    """What each worker ends with: its traffic, and the sum of its weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        if trainer.strategy.trains:
            total = sum(p.detach().double().sum().item() for p in module.parameters())
            told = {"traffic": trainer.strategy.traffic(), "steps": trainer.global_step, "weights": total}
            (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(told))


@pytest.mark.parametrize("servers", [1, 2])
def test_all_async_workers_end_with_the_servers_weights_and_know_the_staleness(servers: int, tmp_path: Path) -> None:
    run = train(Classifier, server(mode="async", servers=servers), 4, max_epochs=3, callbacks=[Tells(tmp_path)])
    workers = 4 - servers
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(workers)]
    total = sum(value.double().sum().item() for value in run.weights.values())
    for one in told:
        assert one["weights"] == pytest.approx(total, abs=1e-12)
        assert one["traffic"]["pushes"] == workers * one["steps"]
        # On average the other workers have stepped once each between a pull and the push that follows.
        assert 0.0 < one["traffic"]["staleness_mean"] <= one["traffic"]["staleness_max"]


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise AssertionError("not on this device")


class CannotStep(Classifier):
    def configure_optimizers(self) -> Any:
        return Fails(self.parameters(), lr=0.1)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_that_fails_beside_a_worker_is_told_while_all_wait_for_it(mode: str) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError, match="server beside rank 0 failed: AssertionError: not on this device"):
        train(CannotStep, server(embedded=True, mode=mode), 2, max_epochs=1)
    assert time.monotonic() - began < SOON


def test_a_lone_worker_is_never_stale() -> None:
    run = train(Classifier, server(mode="async", embedded=True), 1, max_epochs=1)
    told = run.trainer.run_summary()["communication"]
    assert (told["pushes"], told["staleness_mean"], told["staleness_max"]) == (run.steps, 0.0, 0)


class LooksAround(L.LightningModule):
    """Wishes to stop within its first epoch, and looks at that epoch's metrics when it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.seen: dict[str, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.trainer.request_stop("max_time")  # what max_time does where it is over
        loss = self.net(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen = {name: float(value) for name, value in self.trainer.callback_metrics.items()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", [server(), server(embedded=True)], ids=["beside a server", "in one process"])
def test_a_lone_worker_need_not_wait_to_know_its_metrics_and_to_stop(strategy: Any) -> None:
    devices = 1 if "embedded" in strategy else 2
    options = QUIET | {"log_every_n_steps": 50}
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=1, **options)
    module = LooksAround()
    trainer.fit(module, DataLoader(torch.ones(6, 2), batch_size=1))  # type: ignore[arg-type]
    assert trainer.global_step == 2 and module.seen.keys() == {"loss", "loss_step", "loss_epoch"}
