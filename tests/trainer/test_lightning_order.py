"""The same run under Lightning 2.6.6 and under drivetrain: hooks in the same order, the same counters, rates and bits.

Where the two differ on purpose a test here says so: the short last window of an accumulation (Lightning divides it by
the full count), data hooks (loaders are read before ``configure_optimizers``, so that a schedule can be laid out for
their length), and the module's mode after prediction.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as lightning
import pytest
import torch

import drivetrain
from drivetrain.errors import TrainingError
from tests.trainer.twins import Body, Twin, batches, both, make_module, run

CASES: dict[str, dict[str, Any]] = {
    "two epochs": {},
    "sanity check": {"num_sanity_val_steps": 2, "max_epochs": 1},
    "whole sanity check": {"num_sanity_val_steps": -1, "max_epochs": 1},
    "validation twice an epoch": {"val_check_interval": 0.5},
    "validation every 3 batches": {"val_check_interval": 3},
    "validation every 5 batches, over epochs": {"val_check_interval": 5, "check_val_every_n_epoch": None},
    "validation every second epoch": {"check_val_every_n_epoch": 2, "max_epochs": 3},
    "clip by norm": {"gradient_clip_val": 0.1},
    "clip by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulation": {"accumulate_grad_batches": 2, "limit_train_batches": 6},
    "schedule by step": {"hp": {"scheduler": "step"}},
    "schedule by epoch": {"hp": {"scheduler": "epoch"}, "max_epochs": 3},
    "schedule by epoch, accumulation": {
        "hp": {"scheduler": "epoch"},
        "accumulate_grad_batches": 3,
        "limit_train_batches": 6,
    },
    "plateau": {"hp": {"scheduler": "plateau"}, "max_epochs": 3},
    "max_steps in mid-epoch": {"max_steps": 9, "max_epochs": 5},
    "max_steps without max_epochs": {"max_steps": 9, "max_epochs": None},
    "max_steps at an epoch's end": {"max_steps": 14, "max_epochs": 5},
    "no epoch": {"max_epochs": 0},
    "no validation loader": {"val": None},
    "no validation batch": {"limit_val_batches": 0},
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run of three": {"fast_dev_run": 3},
    "limits": {"limit_train_batches": 0.5, "limit_val_batches": 1},
    "overfit": {"overfit_batches": 2},
    "barebones": {"barebones": True, "log_every_n_steps": None, "only_weights": True},
}


def assert_same(a: Twin, b: Twin) -> None:
    """Lightning's ``a`` and drivetrain's ``b`` were called, counted and ended alike, to the bit."""
    assert b.calls == a.calls
    assert b.module.seen == a.module.seen  # epoch, step, batch, loss and learning rate of every step
    for name in ("current_epoch", "global_step", "num_training_batches"):
        assert getattr(b.trainer, name) == getattr(a.trainer, name), name
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        theirs, ours = getattr(a.trainer, name), getattr(b.trainer, name)
        assert ours.keys() == theirs.keys(), name
        for key in theirs:
            assert float(ours[key]) == pytest.approx(float(theirs[key]), rel=1e-6), (name, key)


@pytest.mark.parametrize("case", CASES)
def test_fit(case: str) -> None:
    options = {"num_sanity_val_steps": 0, **CASES[case]}
    if options.pop("only_weights", False):  # Lightning ignores self.log there, drivetrain does not
        for name in ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"):
            options[name] = None
        a, b = both(record=True, **options)
        assert a.calls == b.calls
        assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
        return
    a, b = both(record=True, **options)
    assert_same(a, b)
    if options.get("max_epochs", 2):
        assert b.trainer.estimated_stepping_batches == a.trainer.estimated_stepping_batches


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation(stage: str) -> None:
    a, b = both(record=True, stages=(stage,))
    # Prediction gives the module its mode back, as the other evaluations do; Lightning has no hook for it.
    assert [call for call in b.calls if call != "module.on_predict_model_train"] == a.calls
    if stage == "predict":
        assert len(a.result) == len(b.result) == 3
        assert all(torch.equal(x, y) for x, y in zip(a.result, b.result, strict=True))
    else:
        assert b.result[0].keys() == a.result[0].keys()
        assert b.result[0] == pytest.approx(a.result[0], rel=1e-6)


@pytest.mark.parametrize("moment", ["validation", "validation in mid-epoch", "training epoch", "with min_epochs"])
def test_early_stop(moment: str) -> None:
    def callbacks(library: Any) -> list[Any]:
        if library is lightning:
            from lightning.pytorch.callbacks import EarlyStopping
        else:
            from drivetrain_plugins.callbacks.early_stopping import EarlyStopping
        monitor = "loss_epoch" if moment == "training epoch" else "val"
        return [EarlyStopping(monitor, patience=1, min_delta=10.0, check_on_train_epoch_end=None)]

    options: dict[str, Any] = {"max_epochs": 5, "num_sanity_val_steps": 0}
    if moment == "validation in mid-epoch":
        options["val_check_interval"] = 2
    if moment == "training epoch":
        options["val"] = None
    if moment == "with min_epochs":
        options["min_epochs"] = 4
    a, b = both(record=True, callbacks=callbacks, **options)
    assert_same(a, b)
    assert b.trainer.should_stop is a.trainer.should_stop is True
    assert 0 < b.trainer.current_epoch < 5


@pytest.mark.parametrize("options", [{}, {"min_steps": 6}, {"min_epochs": 2}])
def test_a_module_that_asks_to_stop_is_validated_first(options: dict[str, Any]) -> None:
    class Stopping(Body):
        def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 3:
                self.trainer.should_stop = True

    a, b = both(record=True, body=Stopping, num_sanity_val_steps=0, max_epochs=4, **options)
    assert_same(a, b)
    assert b.calls.count("module.on_validation_start") >= 1


def test_skipping_the_rest_of_an_epoch() -> None:
    class Skipping(Body):
        def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 and batch_idx == 3 else None

    a, b = both(record=True, body=Skipping, num_sanity_val_steps=0, max_epochs=3, hp={"scheduler": "epoch"})
    assert_same(a, b)
    assert b.trainer.global_step == 3 + 7 + 7


def test_skipping_every_epoch_at_once() -> None:
    class Skipping(Body):
        def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> int | None:
            return -1

    a, b = both(record=True, body=Skipping, num_sanity_val_steps=0)
    assert_same(a, b)
    assert b.trainer.global_step == 0 and b.trainer.current_epoch == 2


def test_no_training_batches() -> None:
    a, b = both(record=True, limit_train_batches=0)
    assert b.calls == a.calls
    assert b.trainer.num_training_batches == 0  # Lightning leaves infinity there


def test_loaders_of_the_module() -> None:
    class WithData(Body):
        def train_dataloader(self: Any) -> Any:
            return batches()

        def val_dataloader(self: Any) -> Any:
            return [batches(11, 4), batches(7, 4)]

        def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val", self.loss(batch))
            self.log("other", 1.0 * dataloader_idx, add_dataloader_idx=False) if dataloader_idx else None

    twins = []
    for library in (lightning, drivetrain):
        twin = run(library, ("fit",), body=WithData, train=lambda: None, val=None, num_sanity_val_steps=1)
        twins.append(twin)
    assert_same(*twins)
    assert {"val/dataloader_idx_0", "val/dataloader_idx_1", "other"} <= twins[1].trainer.callback_metrics.keys()


# -- against a loop written by hand -----------------------------------------------------------------------------
def _by_hand(
    epochs: int, accumulate: int, clip: float | None, scheduled: bool
) -> tuple[list[float], list[torch.Tensor]]:
    """Plain torch. A short last window is a step of its own whose micro-batches weigh by their samples."""
    module: Any = make_module(drivetrain)()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) if scheduled else None
    losses = []
    for _ in range(epochs):
        listed = list(batches())
        for start in range(0, len(listed), accumulate):
            window = listed[start : start + accumulate]
            total = sum(len(x) for x, _ in window)
            optimizer.zero_grad()
            for x, y in window:
                loss = torch.nn.functional.cross_entropy(module.net(x), y)
                losses.append(loss.item())
                share = len(x) / total
                (loss if share == 1.0 else loss * share).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return losses, [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_bit_equal_to_a_loop_by_hand(accumulate: int, clip: float | None) -> None:
    losses, weights = _by_hand(2, accumulate, clip, scheduled=True)
    twin = run(
        drivetrain, hp={"scheduler": "step"}, val=None, accumulate_grad_batches=accumulate, gradient_clip_val=clip
    )
    assert [seen[3] for seen in twin.module.seen] == losses
    assert all(torch.equal(a, b) for a, b in zip(weights, twin.module.parameters(), strict=True))


def test_the_short_last_window_is_where_lightning_differs() -> None:
    a, b = both(accumulate_grad_batches=2, max_epochs=1, record=True)
    assert a.calls == b.calls
    assert a.module.seen == b.module.seen  # 7 batches: three whole windows, then one of a single batch
    assert not all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


# -- where values may be logged ---------------------------------------------------------------------------------
LOGGING_HOOKS = [
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
]
SILENT_HOOKS = [
    "on_fit_start",
    "on_fit_end",
    "on_train_end",
    "on_validation_end",
    "setup",
    "teardown",
    "configure_optimizers",
    "lr_scheduler_step",
    "on_validation_model_eval",
    "on_before_batch_transfer",
]


def _logging_in(hook: str) -> type:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.times = getattr(self, "times", 0) + 1
        self.log("x", float(self.times))
        return getattr(super(Logging, self), hook)(*args, **kwargs)

    Logging = type("Logging", (Body,), {hook: method})
    return Logging


@pytest.mark.parametrize("hook", LOGGING_HOOKS)
def test_logging_defaults_of_each_hook(hook: str) -> None:
    a, b = both(body=_logging_in(hook), num_sanity_val_steps=0)
    assert float(b.trainer.callback_metrics["x"]) == pytest.approx(float(a.trainer.callback_metrics["x"]))
    for name in ("callback_metrics", "logged_metrics"):
        assert getattr(b.trainer, name).keys() == getattr(a.trainer, name).keys()


@pytest.mark.parametrize("hook", SILENT_HOOKS)
def test_hooks_in_which_nothing_can_be_logged(hook: str) -> None:
    with pytest.raises(TrainingError, match=r"self.log\('x', ...\) cannot be called"):
        run(drivetrain, body=_logging_in(hook), hp={"scheduler": "step"}, num_sanity_val_steps=0, max_epochs=1)
