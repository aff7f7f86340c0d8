"""What a module, its callbacks and its optimizer do around a step has the effect that it has in one process, although
the servers step: each of these was once lost in silence."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Callback
from drivetrain.errors import ConfigurationError, WorkerError
from drivetrain_plugins.strategies.declared.parameter_server import PARAMETER_SERVER, ParameterServerOptions
from drivetrain_plugins.strategies.parameter_server import ParameterServer
from tests.runs import Classifier, difference, train


def server(**options: Any) -> dict[str, Any]:
    return {"name": "parameter_server", **options}


class HalvesGradients(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)


class ClipsOneLayer(Classifier):
    def configure_gradient_clipping(self, *rest: Any, **named: Any) -> None:
        nn.utils.clip_grad_norm_(self.net[0].parameters(), 0.05)


class ClipsWeights(Classifier):
    """As a Wasserstein GAN does it, past autograd's notice."""

    def on_train_batch_end(self, *rest: Any) -> None:
        for p in self.parameters():
            p.data.clamp_(-0.2, 0.2)


class BeginsElsewhere(Classifier):
    def on_fit_start(self) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.5)


class Scaled(torch.optim.Optimizer):
    """Keeps a number beside its groups, which no pickle of it holds."""

    def __init__(self, params: Any, lr: float, scale: float) -> None:
        super().__init__(params, {"lr": lr})
        self.scale = scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * self.scale)


class OwnOptimizer(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = Scaled(self.parameters(), 0.2, 0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LastLayer(Classifier):
    """The gradients of what is not trained are no part of the norm."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[4].parameters(), lr=0.2, momentum=0.9)


@pytest.mark.parametrize(
    ("options", "devices"), [({}, 3), ({"servers": 2}, 4), ({"embedded": True}, 2)], ids=["one", "two", "embedded"]
)
@pytest.mark.parametrize(
    "make", [HalvesGradients, ClipsOneLayer, ClipsWeights, BeginsElsewhere, OwnOptimizer, LastLayer]
)
def test_as_in_one_process(make: Any, options: dict[str, Any], devices: int) -> None:
    settings = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2, "max_epochs": 1}
    reference, run = train(make, **settings), train(make, server(**options), devices, **settings)
    assert max(difference(reference, run).values()) < 1e-10


class Norms(Callback):
    """The norm of the gradients before every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen.append(float(sum(p.grad.square().sum() for p in module.parameters()) ** 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = list(state_dict["seen"])


def test_callbacks_see_the_true_gradients() -> None:
    expected, found = Norms(), Norms()
    train(callbacks=[expected], max_epochs=1)
    train(strategy=server(servers=2), devices=4, callbacks=[found], max_epochs=1)
    assert found.seen == pytest.approx(expected.seen, abs=1e-12)


def test_gradients_are_fetched_only_where_somebody_looks() -> None:
    """A lone worker with the server beside it counts both ways: gradients and weights; fetched and given back."""
    size = sum(p.numel() * 8 for p in Classifier().double().parameters())
    for make, times in ((Classifier, 2), (HalvesGradients, 4)):
        run = train(make, server(embedded=True), 1, max_epochs=1)
        sent = run.trainer.run_summary()["communication"]["bytes_sent"]
        assert times * size * run.steps < sent < (times + 1) * size * run.steps


def test_async_refuses_weights_that_something_else_changes() -> None:
    with pytest.raises(WorkerError, match=r"changed on rank \d by something else than the optimizer: .*mode=sync"):
        train(ClipsWeights, server(mode="async"), 3, max_epochs=1)


def test_async_hooks_change_each_workers_own_gradients() -> None:
    """With one worker nothing is stale: the run is that of one process."""
    options = {"mode": "async", "embedded": True}
    reference, run = train(HalvesGradients, max_epochs=1), train(HalvesGradients, server(**options), 1, max_epochs=1)
    assert max(difference(reference, run).values()) < 1e-10


class Fails(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.trainer.global_rank == 1:
            raise ValueError("the second worker's own fault")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("options", [{}, {"embedded": True}, {"mode": "async"}], ids=str)
def test_the_first_cause_is_shown(options: dict[str, Any]) -> None:
    with pytest.raises(WorkerError, match="rank 1 failed: ValueError: the second worker's own fault"):
        train(Fails, server(**options), 3)


def test_a_server_beside_a_worker_prints_no_traceback_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it fails with is kept for the worker, who raises it."""

    class Failing:
        def run(self) -> None:
            raise RuntimeError("worker 1 is gone")

    printed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    strategy = ParameterServer(ParameterServerOptions(embedded=True), PARAMETER_SERVER.support)
    strategy._start(Failing())  # type: ignore[arg-type]
    assert strategy.thread is not None
    strategy.thread.join()
    assert not printed


class NoOptimizer(Classifier):
    def configure_optimizers(self) -> Any:
        return None


def test_no_optimizer_is_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match="NoOptimizer configures no optimizer, which the servers would step"):
        train(NoOptimizer, server(), 2)


class ChangesStates(Callback):
    """Begins each epoch without momentum; reads, sets or loads what is kept of a weight."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        optimizer = trainer.optimizers[0]
        if self.how == "clear":
            optimizer.state.clear()
        elif self.how == "read":
            assert optimizer.state[next(module.parameters())] is not None
        elif self.how == "load":
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            optimizer.state[next(module.parameters())] = {}


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("how", ["clear", "read", "set", "load"])
def test_states_that_the_servers_hold_are_not_changed_in_silence(how: str, embedded: bool) -> None:
    with pytest.raises(WorkerError, match="servers hold the states"):
        train(strategy=server(embedded=embedded), devices=2, callbacks=[ChangesStates(how)], timeout=20)
