"""How much is run: limits, fast_dev_run, overfitting, validation intervals, time limits, and modes of a whole run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import SumMetric

from drivetrain import Trainer
from drivetrain.errors import ConfigurationError, TrainingError
from drivetrain_plugins.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain_plugins.callbacks.timer import Timer
from tests.patience import SOON
from tests.runs import QUIET, Classifier, dataset, loader, train


class Counting(Classifier):
    """Counts the batches of each kind, and notes after how many training batches each validation came."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"train": 0, "val": 0, "sanity": 0, "test": 0, "predict": 0}
        self.validated_after: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counts["train"] += 1
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated_after.append(self.counts["train"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.counts["sanity" if self.trainer.sanity_checking else "val"] += 1
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.counts["test"] += 1

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.counts["predict"] += 1
        return super().predict_step(batch, batch_idx)


def _counted(**options: Any) -> Counting:
    """Two epochs of 7 training batches, with 5 validation batches, unless the options say otherwise."""
    validation = options.pop("validation", loader(23, 5))
    module = train(Counting, validation=validation, **options).module
    assert isinstance(module, Counting)
    return module


@pytest.mark.parametrize(
    ("limit", "batches"), [(3, 3), (1, 1), (100, 7), (1.0, 7), (0.5, 3), (0.99, 6), (0, 0), (0.0, 0)]
)
def test_limit_train_batches(limit: int | float, batches: int) -> None:
    module = _counted(limit_train_batches=limit)
    assert module.counts["train"] == 2 * batches
    assert module.trainer.num_training_batches == batches


@pytest.mark.parametrize(("limit", "batches"), [(2, 2), (1.0, 5), (0.5, 2), (0, 0), (0.0, 0)])
def test_limit_val_batches(limit: int | float, batches: int) -> None:
    module = _counted(limit_val_batches=limit, num_sanity_val_steps=-1)
    assert module.counts["val"] == 2 * batches
    assert module.counts["sanity"] == batches


@pytest.mark.parametrize("which", ["train", "val"])
def test_a_fraction_that_leaves_nothing_is_told(which: str) -> None:
    with pytest.raises(ConfigurationError, match=r"a limit of 0.1 of the \d batches of a loader leaves none"):
        _counted(**{f"limit_{which}_batches": 0.1})


def test_limits_of_test_and_predict() -> None:
    trainer = Trainer(**QUIET, limit_test_batches=2, limit_predict_batches=0.5, precision="64-true")
    module = Counting()
    trainer.test(module, loader(23, 5), verbose=False)
    assert len(trainer.predict(module, loader(23, 5)) or []) == 2
    assert (module.counts["test"], module.counts["predict"]) == (2, 2)


def test_limits_are_in_global_batches_on_two_ranks() -> None:
    assert train(strategy="ddp", devices=2, limit_train_batches=3).steps == 6


@pytest.mark.parametrize(("fast", "batches"), [(True, 1), (3, 3)])
def test_fast_dev_run(fast: int | bool, batches: int, tmp_path: Path) -> None:
    from drivetrain_plugins.callbacks.model_checkpoint import ModelCheckpoint
    from drivetrain_plugins.loggers.csv import CSVLogger

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = Trainer(
        **quiet,
        fast_dev_run=fast,
        logger=CSVLogger(tmp_path / "logs"),
        callbacks=[ModelCheckpoint(dirpath=tmp_path / "checkpoints")],
        default_root_dir=tmp_path,
        max_epochs=5,
        num_sanity_val_steps=2,
        precision="64-true",
    )
    module = Counting()
    trainer.fit(module, loader(), loader(23, 5))
    trainer.test(module, loader(23, 5), verbose=False)
    assert module.counts == {"train": batches, "val": batches, "sanity": 0, "test": batches, "predict": 0}
    assert trainer.global_step == batches and trainer.max_epochs == 1
    assert list(tmp_path.iterdir()) == []


def test_overfitting_sees_the_same_batches_again() -> None:
    class Seen(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.first: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.first.append(float(batch[0][0, 0]))
            return super().training_step(batch, batch_idx)

    outcome = train(Seen, validation=loader(23, 5), overfit_batches=2, max_epochs=3)
    module: Any = outcome.module
    assert module.counts["train"] == 6 and module.counts["val"] == 6
    x = dataset().tensors[0]
    assert module.first == [float(x[0, 0]), float(x[8, 0])] * 3  # the loader shuffles, overfitting does not
    assert _counted(overfit_batches=0.5, max_epochs=1).counts["train"] == 3


@pytest.mark.parametrize(
    ("options", "after"),
    [
        ({}, [7, 14]),
        ({"val_check_interval": 1.0}, [7, 14]),
        ({"val_check_interval": 0.5}, [3, 6, 10, 13]),
        ({"val_check_interval": 4}, [4, 11]),
        ({"val_check_interval": 7}, [7, 14]),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [4, 8, 12]),
        ({"val_check_interval": 10, "check_val_every_n_epoch": None}, [10]),
        ({"check_val_every_n_epoch": 2}, [14]),
        ({"check_val_every_n_epoch": 2, "val_check_interval": 3}, [10, 13]),
        ({"max_steps": 5, "val_check_interval": 3}, [3]),
        ({"accumulate_grad_batches": 2, "val_check_interval": 4}, [4, 11]),
        ({"accumulate_grad_batches": 2, "val_check_interval": 3}, [4, 6, 11, 13]),
        ({"accumulate_grad_batches": 3, "val_check_interval": 1}, [3, 6, 7, 10, 13, 14]),
        ({"accumulate_grad_batches": 2, "val_check_interval": 5, "check_val_every_n_epoch": None}, [6, 11]),
    ],
)
def test_when_validation_runs(options: dict[str, Any], after: list[int]) -> None:
    assert _counted(**options).validated_after == after


def test_intervals_that_cannot_be_meant() -> None:
    with pytest.raises(ConfigurationError, match="val_check_interval=9 is more than the 7 batches"):
        _counted(val_check_interval=9)
    for interval in (None, 0.5):
        with pytest.raises(ConfigurationError, match="check_val_every_n_epoch=None counts batches over epochs"):
            Trainer(**QUIET, check_val_every_n_epoch=None, val_check_interval=interval)


class _Stream(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        data = dataset(self.samples)
        yield from (data[i] for i in range(self.samples))


def test_streams_have_no_length() -> None:
    stream = DataLoader(_Stream(51), batch_size=8)
    module = _counted(data=stream)
    assert module.validated_after == [7, 14]
    assert module.trainer.num_training_batches == math.inf
    assert _counted(data=stream, limit_train_batches=5).validated_after == [5, 10]
    assert _counted(data=stream, limit_train_batches=50).validated_after == [7, 14]
    assert _counted(data=stream, val_check_interval=3, limit_train_batches=6).validated_after == [3, 6, 9, 12]
    with pytest.raises(ConfigurationError, match="a fraction of an epoch without a known length"):
        _counted(data=stream, val_check_interval=0.5)
    with pytest.raises(ConfigurationError, match="needs a loader that has a length"):
        _counted(data=stream, limit_train_batches=0.5)


def test_a_stream_steps_schedulers_by_epoch_at_its_end() -> None:
    class ByEpoch(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    for limit in (None, 3, 50):
        outcome = train(ByEpoch, data=DataLoader(_Stream(51), batch_size=8), limit_train_batches=limit)
        assert outcome.trainer.optimizers[0].param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("devices", [1, 2])
def test_max_time(devices: int) -> None:
    class Slow(Counting):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.03)
            return super().training_step(batch, batch_idx)

    begun = time.monotonic()
    outcome = train(
        Slow,
        "single" if devices == 1 else "ddp",
        devices,
        validation=loader(23, 5),
        max_time=timedelta(milliseconds=400),
        max_epochs=-1,
        log_every_n_steps=1,
    )
    assert time.monotonic() - begun < SOON
    assert 0 < outcome.steps < 40
    assert outcome.trainer.should_stop and outcome.trainer.status == "stopped"
    assert "val/loss" in outcome.metrics  # what training ends with is validated


def test_max_time_beside_a_timer_is_told() -> None:
    timer = Timer("00:00:00:09")
    with pytest.warns(UserWarning, match="max_time='00:00:00:03' is not used: callbacks have a Timer already"):
        trainer = Trainer(**QUIET, max_time="00:00:00:03", callbacks=[timer])
    assert trainer.callbacks == [timer]


def test_no_epochs_and_no_steps() -> None:
    for options in ({"max_epochs": 0}, {"max_steps": 0}):
        outcome = train(**options)
        assert (outcome.steps, outcome.trainer.current_epoch, outcome.curve) == (0, 0, [])


def test_default_number_of_epochs() -> None:
    assert Trainer(**QUIET).max_epochs == 1000
    assert Trainer(**QUIET, max_steps=5).max_epochs == -1
    assert Trainer(**QUIET, max_time="00:00:00:10").max_epochs == -1
    assert Trainer(**QUIET, min_steps=5).min_epochs == 1
    assert train(max_steps=20, max_epochs=None).trainer.current_epoch == 3


@pytest.mark.parametrize("inference", [True, False])
def test_inference_mode(inference: bool) -> None:
    class Asks(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert not torch.is_grad_enabled()
            within_fit = self.trainer.state.fn == "fit"  # where training may use what validation leaves
            assert torch.is_inference_mode_enabled() is (inference and not within_fit)
            assert not self.net.training

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            self.validation_step(batch, batch_idx)
            return batch[0]

    outcome = train(Asks, validation=loader(8), inference_mode=inference)
    outcome.trainer.test(outcome.module, loader(8), verbose=False)
    outcome.trainer.predict(outcome.module, loader(8))
    assert torch.is_grad_enabled() and outcome.module.training


def test_metric_of_an_evaluation_in_a_further_fit() -> None:
    class Measures(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.seen = SumMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.update(len(batch[0]))
            self.log("seen", self.seen)

    module, trainer = Measures(), Trainer(**QUIET, max_epochs=1)
    trainer.validate(module, loader(8), verbose=False)
    trainer.fit(module, loader(8), loader(8))
    assert trainer.callback_metrics["seen"] == 8


@pytest.mark.parametrize(
    ("given", "enabled", "warn"), [(True, True, False), ("warn", True, True), (None, False, False)]
)
def test_deterministic(given: Any, enabled: bool, warn: bool) -> None:
    class Asks(Classifier):
        def on_train_start(self) -> None:
            assert torch.are_deterministic_algorithms_enabled() is enabled
            assert torch.is_deterministic_algorithms_warn_only_enabled() is warn

    train(Asks, deterministic=given, max_epochs=1)
    assert not torch.are_deterministic_algorithms_enabled()


def test_detect_anomaly() -> None:
    class Breaks(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            zero = self.net[0].weight.sum() * 0.0
            return self.loss(batch) + torch.sqrt(zero) * 0.0  # finite loss, gradient 0/0

    with pytest.warns(UserWarning, match="detect_anomaly"), pytest.raises(RuntimeError, match="returned nan"):
        train(Breaks, detect_anomaly=True, max_epochs=1)
    assert not torch.is_anomaly_enabled()


def test_barebones_runs_without_extras(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", barebones=True, max_epochs=1, default_root_dir=tmp_path, precision="64-true")
    module = Counting()
    trainer.fit(module, loader(), loader(23, 5))
    assert module.counts == {"train": 7, "val": 5, "sanity": 0, "test": 0, "predict": 0}
    assert trainer.callbacks == [] and trainer.loggers == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"logger": True}, "against logger=True: leave out that"),
        ({"enable_checkpointing": True}, "enable_checkpointing=True"),
        ({"enable_progress_bar": True}, "enable_progress_bar=True"),
        ({"enable_model_summary": True}, "enable_model_summary=True"),
        ({"log_every_n_steps": 10}, "log_every_n_steps=10"),
        ({"num_sanity_val_steps": 2}, "num_sanity_val_steps=2"),
        ({"fast_dev_run": True}, "fast_dev_run=True"),
        ({"detect_anomaly": True}, "detect_anomaly=True"),
        ({"callbacks": ModelCheckpoint()}, "against the ModelCheckpoint in callbacks"),
        ({"logger": True, "fast_dev_run": 2}, "logger=True and fast_dev_run=2: leave out these"),
    ],
)
def test_barebones_refuses_extras(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Trainer(accelerator="cpu", barebones=True, **options)


# -- losses that are not finite ---------------------------------------------------------------------------------
class NotFinite(Classifier):
    """The loss of batch 3 is NaN, on rank ``where`` only (None: on all)."""

    where: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * float("nan") if batch_idx == 3 and self.where in (None, self.global_rank) else loss


class OnRankOne(NotFinite):
    where = 1


def test_a_nan_loss_is_named_with_step_and_rank() -> None:
    with pytest.raises(TrainingError, match="the loss is nan at step 4 on rank 0"):
        train(NotFinite)
    with pytest.raises(Exception, match="the loss is nan at step 4 on rank 1"):
        train(OnRankOne, "ddp", 2)


@pytest.mark.filterwarnings("ignore:step 4 is skipped")
@pytest.mark.parametrize("module", [NotFinite, OnRankOne])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_nan_loss_is_skipped_on_all_ranks(module: type[NotFinite], devices: int) -> None:
    outcome = train(module, "single" if devices == 1 else "ddp", devices, nonfinite="skip", max_epochs=1)
    skips = module is NotFinite or devices == 2
    assert outcome.steps == 7 - skips
    assert all(torch.isfinite(weight).all() for weight in outcome.weights.values())


@pytest.mark.parametrize("every", [1, 50])
def test_a_nan_loss_is_warned_of(every: int) -> None:
    with pytest.warns(UserWarning, match="the loss is nan at step 4 on rank 0"):
        outcome = train(NotFinite, nonfinite="warn", max_epochs=1, log_every_n_steps=every)
    assert outcome.steps == 7
    assert any(torch.isnan(weight).any() for weight in outcome.weights.values())
