"""EarlyStopping: when it stops, with which reason, and what it refuses."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from drivetrain.errors import ConfigurationError, TrainingError
from drivetrain_plugins.callbacks.early_stopping import EarlyStopping


def run(make_trainer: Callable[..., Any], values: list[float], **arguments: Any) -> tuple[Any, EarlyStopping]:
    stopping = EarlyStopping("val/loss", **arguments)
    trainer = make_trainer(stopping).fit(len(values), lambda epoch: {"val/loss": values[epoch]})
    return trainer, stopping


@pytest.mark.parametrize(
    ("values", "arguments", "epochs", "reason"),
    [
        ([5, 4, 4, 4, 3], {"patience": 2}, 4, "did not improve in 2 checks; its best was 4"),
        ([5, 4, 4, 4, 3], {"patience": 3}, 5, ""),
        ([1, 2, 2, 1, 0], {"patience": 3, "mode": "max"}, 5, "did not improve in 3 checks"),
        ([5, 4.95, 4.9, 4.85], {"patience": 2, "min_delta": 0.1}, 3, "did not improve"),
        ([5, 4.8, 4.6, 4.4], {"patience": 2, "min_delta": -0.1}, 4, ""),
        ([5, math.nan, 3], {}, 2, "is not finite"),
        ([5, math.nan, math.inf, 3], {"check_finite": False, "patience": 3}, 4, ""),
        ([5, 0.5, 0.1, 0], {"stopping_threshold": 0.3}, 3, "threshold is reached"),
        ([5, 6, 11, 1], {"divergence_threshold": 10}, 3, "diverges"),
        ([0.5, 0.9, 0.99], {"mode": "max", "stopping_threshold": 0.8}, 2, "threshold is reached"),
    ],
)
def test_stops(
    make_trainer: Callable[..., Any], values: list[float], arguments: dict[str, Any], epochs: int, reason: str
) -> None:
    trainer, stopping = run(make_trainer, values, **arguments)
    assert trainer.current_epoch == epochs
    assert reason in (stopping.stopping_reason_message or "")
    assert trainer.should_stop == bool(stopping.stopping_reason_message) == bool(stopping.stopping_reason.value)
    assert stopping.stopped_epoch == (epochs - 1 if trainer.should_stop else 0)


def test_metric_of_the_training_epoch(make_trainer: Callable[..., Any]) -> None:
    stopping = EarlyStopping("loss", patience=1)
    trainer = make_trainer(stopping).fit(5, train=lambda epoch: {"loss": [3.0, 2.0, 2.5, 1.0, 0.0][epoch]})
    assert trainer.current_epoch == 3
    without = EarlyStopping("loss", patience=1)
    trainer = make_trainer(without, num_val_batches=[]).fit(5, train=lambda epoch: {"loss": float(epoch)})
    assert trainer.current_epoch == 2


def test_resume_goes_on_waiting(make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    _, first = run(make_trainer, [5, 4, 4], patience=2)
    again = EarlyStopping("val/loss", patience=9)
    again.load_state_dict(first.state_dict())
    assert (again.wait_count, again.patience, again.best_score.item()) == (1, 2, 4.0)
    with caplog.at_level(logging.WARNING):
        again.on_fit_start(make_trainer(again), None)  # type: ignore[arg-type]
        again.on_fit_start(make_trainer(again), None)  # type: ignore[arg-type]
    assert len(caplog.records) == 1
    assert "the checkpoint's patience=2, not the patience=9" in caplog.text
    trainer = make_trainer(again).fit(3, lambda epoch: {"val/loss": 4.0})
    assert trainer.current_epoch == 1


def test_not_outside_of_fit(make_trainer: Callable[..., Any]) -> None:
    stopping = EarlyStopping("val/loss", patience=0)
    trainer = make_trainer(stopping)
    trainer.call("setup", "validate")
    trainer.validate_now(**{"val/loss": math.nan})
    assert not trainer.should_stop
    trainer = make_trainer(EarlyStopping("absent"), fast_dev_run=True)
    assert trainer.fit(1).current_epoch == 1


def test_missing_metric(make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TrainingError, match=r"EarlyStopping\(monitor='val/los'\).*did you mean 'val/loss'"):
        make_trainer(EarlyStopping("val/los")).fit(1, lambda epoch: {"val/loss": 1.0})
    trainer = make_trainer(EarlyStopping("absent", strict=False)).fit(2)
    assert trainer.current_epoch == 2
    assert "monitor='absent'" in caplog.text


def test_reports(make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run(make_trainer, [5, 4, 4], patience=1, verbose=True)
    assert [record.message for record in caplog.records] == [
        "val/loss improved to 5.",
        "val/loss improved by 1 to 4.",
        "val/loss did not improve in 1 checks; its best was 4.",
    ]


def test_refuses() -> None:
    with pytest.raises(ConfigurationError, match="use 'min' or 'max'"):
        EarlyStopping("a", mode="low")
    with pytest.raises(ConfigurationError, match="is negative"):
        EarlyStopping("a", patience=-1)


def test_a_subclass_that_judges_in_another_way(make_trainer: Callable[..., Any]) -> None:
    class Below(EarlyStopping):
        def _evaluate_stopping_criteria(self, current: torch.Tensor) -> tuple[bool, str | None]:
            stop, message = super()._evaluate_stopping_criteria(current)
            return (True, "low enough") if current < 4 else (stop, message)

    stopping = Below("val/loss", patience=9)
    trainer = make_trainer(stopping).fit(4, lambda epoch: {"val/loss": 6 - epoch})
    assert (trainer.should_stop, stopping.stopped_epoch, stopping.stopping_reason_message) == (True, 3, "low enough")


def test_what_subclasses_compare_with() -> None:
    for mode, op, sign in (("min", torch.lt, "<"), ("max", torch.gt, ">")):
        stopping = EarlyStopping("x", mode=mode)
        assert (stopping.monitor_op, stopping.order_dict[mode]) == (op, sign)
        assert stopping.monitor_op(torch.tensor(0.0) - stopping.min_delta, stopping.best_score)
