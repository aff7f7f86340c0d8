"""Timer, LearningRateMonitor, ThroughputMonitor."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain_plugins.callbacks.learning_rate_monitor import LearningRateMonitor
from drivetrain_plugins.callbacks.throughput_monitor import ThroughputMonitor
from drivetrain_plugins.callbacks.timer import Timer


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


# -- Timer --------------------------------------------------------------------------------------------------------
def test_durations() -> None:
    assert Timer("01:02:03:04").time_remaining() == 93784
    assert Timer({"minutes": 2}).time_remaining() == 120
    assert Timer(timedelta(days=1)).time_remaining() == 86400
    assert Timer("00:00:00:00").time_remaining() == 0
    for wrong in ("1:2:3", "a:b:c:d", "00:00:00:-5", "99999999999:0:0:0", {"fortnights": 1}):
        with pytest.raises(ConfigurationError, match=r"duration=.* give a time as 'DD:HH:MM:SS'"):
            Timer(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="use 'step' or 'epoch'"):
        Timer(interval="batch")
    with pytest.raises(ConfigurationError, match="no stage 'fit'"):
        Timer().time_elapsed("fit")


@pytest.mark.parametrize(("interval", "asked_at"), [("step", 2), ("epoch", 4)])
def test_time_is_up(make_trainer: Callable[..., Any], clock: Clock, interval: str, asked_at: int) -> None:
    timer = Timer({"seconds": 10}, interval=interval)
    trainer = make_trainer(timer)
    trainer.call("on_train_start")
    asked = []
    for index in range(4):
        clock.now += 6
        trainer.call("on_train_batch_end", None, None, index)
        asked.append(len(trainer.stops))
    trainer.call("on_train_epoch_end")
    asked.append(len(trainer.stops))
    assert trainer.stops == ["max_time"], "asked once"
    assert not trainer.should_stop, "a wish of this rank alone"
    assert asked.index(1) + (interval == "step") == asked_at


def test_stages_and_resume(make_trainer: Callable[..., Any], clock: Clock) -> None:
    timer = Timer("00:00:01:00")
    trainer = make_trainer(timer)
    assert timer.time_elapsed() == 0.0
    trainer.call("on_train_start")
    clock.now += 20
    trainer.call("on_validation_start")
    clock.now += 5
    trainer.call("on_validation_end")
    trainer.call("on_train_end")
    clock.now += 1000
    assert (timer.time_elapsed("train"), timer.time_elapsed("validate"), timer.time_remaining()) == (25, 5, 35)
    again = Timer("00:00:01:00")
    again.load_state_dict(timer.state_dict())
    trainer = make_trainer(again)
    trainer.call("on_train_start")
    clock.now += 10
    assert (again.time_elapsed(), again.time_remaining()) == (35, 25)
    assert Timer().time_remaining() is None


def test_the_check_before_training_is_a_validation_too(make_trainer: Callable[..., Any], clock: Clock) -> None:
    timer = Timer()
    trainer = make_trainer(timer)
    trainer.call("on_validation_start")
    clock.now += 3
    trainer.sanity_checking = True
    trainer.call("on_sanity_check_start")
    trainer.call("on_validation_start")
    clock.now += 2
    trainer.call("on_validation_end")
    trainer.call("on_sanity_check_end")
    assert (timer.time_elapsed("validate"), timer.time_elapsed("sanity_check")) == (2, 2)


# -- LearningRateMonitor ------------------------------------------------------------------------------------------
def parameters(count: int = 1) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(1)) for _ in range(count)]


def config(scheduler: Any, interval: str = "epoch", name: str | None = None) -> Any:
    return SimpleNamespace(scheduler=scheduler, interval=interval, name=name, monitor=None)


def test_names(make_trainer: Callable[..., Any]) -> None:
    a, b = parameters(2)
    adam = torch.optim.Adam([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.2}], betas=(0.8, 0.9))
    second = torch.optim.Adam(parameters(), lr=0.3, weight_decay=0.5)
    sgd = torch.optim.SGD([{"params": parameters(), "name": "head"}], lr=0.4, momentum=0.6)
    named = torch.optim.SGD(parameters(), lr=0.5)
    schedule = config(torch.optim.lr_scheduler.StepLR(named, 1), name="warm")
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    trainer = make_trainer(
        monitor, optimizers=[adam, SimpleNamespace(optimizer=second), sgd, named], lr_scheduler_configs=[schedule]
    )
    trainer.fit(1)
    logged = {key: value for _, row in trainer.loggers[0].rows for key, value in row.items()}
    rates = {key: value for key, value in logged.items() if not key.endswith(("momentum", "decay"))}
    assert rates == {
        "lr-Adam/pg1": 0.1,
        "lr-Adam/pg2": 0.2,
        "lr-Adam-1": 0.3,
        "lr-SGD/head": 0.4,
        "warm": 0.5,
    }
    assert logged["lr-Adam/pg1-momentum"] == 0.8
    assert logged["lr-SGD/head-momentum"] == 0.6
    assert logged["lr-Adam-1-weight_decay"] == 0.5
    assert trainer.callback_metrics["lr-Adam-1"] == torch.tensor(0.3, dtype=torch.float64)


def test_groups_that_would_share_a_name(make_trainer: Callable[..., Any]) -> None:
    a, b = parameters(2)
    for names in ({"name": "x"}, {"name": "x"}), ({"name": "pg2"}, {}):
        groups = [{"params": [p], **name} for p, name in zip((a, b), names, strict=True)]
        trainer = make_trainer(LearningRateMonitor(), optimizers=[torch.optim.SGD(groups, lr=0.1)])
        with pytest.raises(ConfigurationError, match=r"several parameter groups are called lr-SGD/\w+: give each"):
            trainer.fit(1)


def test_a_group_that_joins_names_the_first_one_anew(make_trainer: Callable[..., Any]) -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    monitor = LearningRateMonitor("epoch")
    trainer = make_trainer(monitor, optimizers=[optimizer])
    trainer.fit(1)
    assert monitor.lrs == {"lr-SGD": [0.1]}
    optimizer.add_param_group({"params": parameters(), "lr": 0.2})
    trainer.call("on_train_epoch_start")
    assert monitor.lrs == {"lr-SGD/pg1": [0.1, 0.1], "lr-SGD/pg2": [0.2]}


def test_momentum_of_an_optimizer_without_any(
    make_trainer: Callable[..., Any], recwarn: pytest.WarningsRecorder
) -> None:
    for optimizer in torch.optim.RMSprop(parameters()), torch.optim.Adam(parameters()):
        make_trainer(LearningRateMonitor(log_momentum=True), optimizers=[optimizer]).fit(1)
    make_trainer(LearningRateMonitor(), optimizers=[torch.optim.Adagrad(parameters())]).fit(1)
    assert not recwarn.list
    trainer = make_trainer(LearningRateMonitor(log_momentum=True), optimizers=[torch.optim.Adagrad(parameters())])
    with pytest.warns(RuntimeWarning, match="lr-Adagrad has no momentum, 0 is logged for it"):
        trainer.fit(1)


def test_intervals(make_trainer: Callable[..., Any]) -> None:
    def steps(interval: str | None) -> list[int]:
        optimizer = torch.optim.SGD(parameters(), lr=1.0)
        schedule = config(torch.optim.lr_scheduler.StepLR(optimizer, 1), "epoch")
        trainer = make_trainer(LearningRateMonitor(interval), optimizers=[optimizer], lr_scheduler_configs=[schedule])
        trainer.fit(2)
        return [step for step, _ in trainer.loggers[0].rows]

    assert steps("step") == [1, 3, 5, 7]
    assert steps("epoch") == steps(None) == [0, 4]
    with pytest.raises(ConfigurationError, match="use 'step', 'epoch' or null"):
        LearningRateMonitor("batch")


def test_once_per_step_of_an_accumulation_window(make_trainer: Callable[..., Any]) -> None:
    monitor = LearningRateMonitor("step")
    trainer = make_trainer(monitor, optimizers=[torch.optim.SGD(parameters(), lr=1.0)], log_every_n_steps=1)
    trainer.call("on_train_start")
    for index in range(3):
        trainer.call("on_train_batch_start", None, index)
    assert trainer.loggers[0].rows == [(0, {"lr-SGD": 1.0})]
    assert monitor.lrs == {"lr-SGD": [1.0]}


def test_other_ranks_only_keep_the_metric(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(
        LearningRateMonitor("epoch"), optimizers=[torch.optim.SGD(parameters(), lr=1.0)], global_rank=1
    )
    trainer.fit(1)
    assert trainer.loggers[0].rows == []
    assert set(trainer.callback_metrics) == {"lr-SGD"}


# -- ThroughputMonitor --------------------------------------------------------------------------------------------
def test_throughput(make_trainer: Callable[..., Any], clock: Clock) -> None:
    monitor = ThroughputMonitor()
    trainer = make_trainer(monitor, last_batch_size=8, log_every_n_steps=2)
    trainer.call("on_train_start")

    def batch(seconds: float, steps: bool = True) -> None:
        trainer.call("on_train_batch_start", None, 0)
        clock.now += seconds
        trainer.global_step += steps
        trainer.call("on_train_batch_end", None, None, 0)

    batch(50.0)  # the first, with all that is built lazily
    batch(0.5)
    assert trainer.loggers[0].rows == [(1, {"samples_per_second": 16.0, "batches_per_second": 2.0})]
    batch(0.25, steps=False)
    batch(0.25)
    trainer.call("on_validation_start")
    clock.now += 100
    trainer.call("on_validation_end")
    clock.now += 100  # other callbacks, a checkpoint
    batch(0.5)
    assert trainer.loggers[0].rows[1:] == [(3, {"samples_per_second": 16.0, "batches_per_second": 3.0})]
    trainer.last_batch_size = 2
    batch(0.5)
    trainer.call("on_train_end")
    clock.now += 100
    assert monitor.samples_per_second == (8 + 16 + 2) / 2.0
    assert "samples_per_second" not in trainer.callback_metrics, "clocks differ between ranks"


def test_throughput_before_anything_ran(make_trainer: Callable[..., Any]) -> None:
    monitor = ThroughputMonitor()
    make_trainer(monitor, num_training_batches=1, num_val_batches=[2]).fit(0)
    assert monitor.samples_per_second == 0.0
