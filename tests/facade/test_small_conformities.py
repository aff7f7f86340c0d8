"""Small things that a project can see, the same under both libraries."""

from __future__ import annotations

import importlib
import inspect
import os
import signal
from enum import Enum
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import lightning.pytorch as theirs
import pytest
import torch
import torchmetrics
import tqdm
import yaml
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import drivetrain.lightning as ours
from drivetrain.errors import ConfigurationError
from tests.facade.recorder import QUIET, loader, net

tqdm.tqdm.monitor_interval = 0  # else it starts a thread
both = pytest.mark.parametrize("L", [theirs, ours], ids=["lightning", "drivetrain"])


def module(L: Any, **parts: Any) -> Any:
    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.accuracy = torchmetrics.MeanMetric()
            shared = {
                "mean": torchmetrics.classification.BinaryPrecision(),
                "max": torchmetrics.classification.BinaryRecall(),
            }
            self.collection = torchmetrics.MetricCollection(shared, prefix="all/")
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    return type("Project", (Module,), parts)()


def trainer(L: Any, folder: Path, **flags: Any) -> Any:
    given = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "default_root_dir": str(folder)}
    return L.Trainer(**{**QUIET, **given, **flags})


@both
def test_a_metric_that_is_logged_by_step_begins_anew_with_each_epoch(L: Any, tmp_path: Path) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.accuracy(1.0)
        self.log("accuracy", self.accuracy)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_start(self: Any) -> None:
        self.seen.append(self.accuracy._update_count)

    project = module(L, training_step=training_step, on_train_epoch_start=on_train_epoch_start)
    trainer(L, tmp_path, max_epochs=3).fit(project, loader())
    assert project.seen == [0, 0, 0]
    assert project.accuracy._update_count == 0


def test_a_metric_of_a_checkpoint_is_of_the_type_that_it_was_of(tmp_path: Path) -> None:
    """A project that stacks what it finds in ``callback_metrics`` finds one type, in a run that goes on too."""
    found: list[Any] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        double = {"exact": loss.double() / 3, "half": torch.tensor(0.5).double()}
        self.log_dict({"loss": loss, "tenth": 0.1, "none": float("nan"), **double})
        return loss

    def note(self: Any) -> None:
        found.append({name: (value.dtype, str(value)) for name, value in self.trainer.callback_metrics.items()})

    parts = {"training_step": training_step, "on_fit_start": note, "on_train_epoch_end": note}
    saver = ours.callbacks.ModelCheckpoint(tmp_path, "at")
    first = trainer(ours, tmp_path, callbacks=[saver], enable_checkpointing=True)
    first.fit(module(ours, **parts), loader())
    trainer(ours, tmp_path, max_epochs=2).fit(module(ours, **parts), loader(), ckpt_path=tmp_path / "at.ckpt")
    assert [len(one) for one in found] == [0, 5, 5, 5]
    assert found[2] == found[1]
    assert [found[2][name][0] for name in ("loss", "half", "tenth")] == [torch.float32, torch.float64, torch.float32]


@both
def test_metrics_of_a_collection_go_on_sharing_their_states(L: Any, tmp_path: Path) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        guess = torch.rand(8)
        self.collection(guess, guess.round().long())
        self.log_dict(self.collection, on_epoch=True)
        self.seen.append(self.collection._state_is_copy)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    project = module(L, training_step=training_step)
    at_hand = trainer(L, tmp_path)
    at_hand.fit(project, loader())
    assert not any(project.seen)
    assert {name for name in at_hand.callback_metrics if name.endswith("_epoch")} == {"all/mean_epoch", "all/max_epoch"}


class Stepping(torch.optim.SGD):
    """Takes more than a closure."""

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:  # type: ignore[override]
        self.taken = [*getattr(self, "taken", []), scale]
        return super().step(closure)


@both
def test_an_optimizers_own_arguments_reach_it(L: Any, tmp_path: Path) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        optimizer.step(scale=2.0) if batch_idx else optimizer.step()
        self.raw = optimizer.optimizer

    def configure_optimizers(self: Any) -> Any:
        return Stepping(self.net.parameters(), lr=0.1)

    project = module(L, training_step=training_step, configure_optimizers=configure_optimizers)
    project.automatic_optimization = False
    trainer(L, tmp_path, limit_train_batches=3).fit(project, loader())
    assert project.raw.taken == [1.0, 2.0, 2.0]
    assert "step" not in vars(project.raw)


@both
def test_a_schedule_must_be_of_an_optimizer_that_is_stepped(L: Any, tmp_path: Path) -> None:
    def configure_optimizers(self: Any) -> Any:
        one, other = (torch.optim.SGD(self.net.parameters(), lr=0.1) for _ in range(2))
        return [one], [torch.optim.lr_scheduler.StepLR(other, 1)]

    mistake = importlib.import_module(f"{L.__name__}.utilities.exceptions").MisconfigurationException
    with pytest.raises(mistake, match="optimizer"):
        trainer(L, tmp_path).fit(module(L, configure_optimizers=configure_optimizers), loader())


@both
def test_a_step_of_lightning_1_is_refused(L: Any, tmp_path: Path) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int, optimizer_idx: int) -> Any: ...

    with pytest.raises(RuntimeError, match="optimizer"):
        trainer(L, tmp_path).fit(module(L, training_step=training_step), loader())


@both
def test_a_hook_may_be_switched_off(L: Any, tmp_path: Path) -> None:
    project = module(L, validation_step=lambda self, batch, batch_idx: None)
    project.on_validation_model_train = project.on_train_epoch_start = None
    at_hand = trainer(L, tmp_path)
    at_hand.fit(project, loader(), loader())
    assert at_hand.current_epoch == 1


@both
def test_reductions_are_called_in_any_case(L: Any, tmp_path: Path) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("batches", 1.0, on_step=False, on_epoch=True, reduce_fx="SUM")
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    at_hand = trainer(L, tmp_path, limit_train_batches=3)
    at_hand.fit(module(L, training_step=training_step), loader())
    assert at_hand.callback_metrics["batches"] == 3


@both
def test_an_interval_of_no_validation_may_be_long(L: Any, tmp_path: Path) -> None:
    at_hand = trainer(L, tmp_path, val_check_interval=1000, limit_val_batches=0)
    at_hand.fit(module(L, validation_step=lambda *_: None), loader(), loader())
    assert at_hand.current_epoch == 1


@both
def test_data_of_data_sets_know_how_they_are_read(L: Any) -> None:
    class Data(L.LightningDataModule):  # type: ignore[misc, name-defined]
        def __init__(self, size: int, batch_size: int = 1) -> None:
            super().__init__()
            self.known = [size, batch_size]

    data = TensorDataset(torch.zeros(8, 1))
    assert Data.from_datasets(data, batch_size=4, size=3).known == [3, 4]


@both
def test_hooks_hear_of_the_very_interruption(L: Any, tmp_path: Path) -> None:
    heard: list[BaseException] = []
    raised = KeyboardInterrupt("by the project")

    def on_fit_start(self: Any) -> None:
        raise raised

    class Listener(L.Callback):  # type: ignore[misc, name-defined]
        def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
            heard.append(error)

    former = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            trainer(L, tmp_path, callbacks=[Listener()]).fit(module(L, on_fit_start=on_fit_start), loader())
    finally:
        signal.signal(signal.SIGINT, former)  # Lightning ignores it from then on
    assert heard == [raised]


@both
def test_loggers_are_told_metrics_by_name(L: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = importlib.import_module(f"{L.__name__}.loggers").CSVLogger
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(kind, "log_metrics", lambda self, *args, **named: told.append((args, sorted(named))))

    def on_train_start(self: Any) -> None:
        self.log("begun", 1.0)

    trainer(L, tmp_path, logger=kind(str(tmp_path))).fit(module(L, on_train_start=on_train_start), loader())
    assert told == [((), ["metrics", "step"])]


class Rows(IterableDataset[Any]):
    """A stream of rows."""

    def __iter__(self) -> Any:
        return iter(torch.arange(6.0).reshape(6, 1))


@both
def test_a_stream_is_predicted(L: Any, tmp_path: Path) -> None:
    project = module(L, predict_step=lambda self, batch, batch_idx: batch.sum())
    found = trainer(L, tmp_path).predict(project, DataLoader(Rows(), batch_size=4))
    assert [float(one) for one in found] == [6.0, 9.0]


@both
def test_the_bar_expects_no_validation_where_there_is_none(L: Any, tmp_path: Path) -> None:
    bars = importlib.import_module(f"{L.__name__}.callbacks")

    def on_train_epoch_end(self: Any) -> None:
        self.seen.append(self.trainer.progress_bar_callback.total_val_batches)

    parts: dict[str, Any] = {"validation_step": lambda *_: None, "on_train_epoch_end": on_train_epoch_end}
    project = module(L, **parts)
    bar = bars.TQDMProgressBar(refresh_rate=0)
    flags = {"enable_progress_bar": True, "callbacks": [bar], "check_val_every_n_epoch": 2, "limit_val_batches": 2}
    trainer(L, tmp_path, max_epochs=4, **flags).fit(project, loader(), loader())
    assert project.seen == [0, 2, 0, 2]


@both
def test_a_hook_may_be_stood_in_for(L: Any, tmp_path: Path) -> None:
    callback, project = L.Callback(), module(L)
    callback.on_train_start, project.on_train_start = Mock(), Mock()
    project.backward = Mock(side_effect=project.backward)
    at_hand = trainer(L, tmp_path, callbacks=[callback], limit_train_batches=2)
    at_hand.fit(project, loader())
    callback.on_train_start.assert_called_once_with(at_hand, project)
    project.on_train_start.assert_called_once_with()
    assert project.backward.call_count == 2


@both
def test_gradients_of_before_are_let_go(L: Any, tmp_path: Path) -> None:
    seen: list[bool] = []

    def look(self: Any) -> None:
        seen.append(any(parameter.grad is not None for parameter in self.net.parameters()))

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    parts = {"on_train_start": look, "on_validation_start": look, "validation_step": lambda *_: None}
    project = module(L, training_step=training_step, **parts)
    at_hand = trainer(L, tmp_path, limit_train_batches=2)
    project.net(torch.ones(1, project.net[0].in_features)).sum().backward()
    at_hand.fit(project, loader())
    at_hand.validate(project, loader())
    assert seen == [False, False]


@both
def test_data_have_a_place_of_their_own_in_checkpoints(L: Any, tmp_path: Path) -> None:
    class Data(L.LightningDataModule):  # type: ignore[misc, name-defined]
        def __init__(self, size: int) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader()

    at_hand = trainer(L, tmp_path)
    at_hand.fit(module(L), datamodule=Data(5))
    at_hand.save_checkpoint(tmp_path / "kept.ckpt")
    content = torch.load(tmp_path / "kept.ckpt", weights_only=True)
    assert content[Data.CHECKPOINT_HYPER_PARAMS_KEY] == {"size": 5}
    assert content[Data.CHECKPOINT_HYPER_PARAMS_NAME] == "kwargs"


class Speed(Enum):
    """Of a project's hyper-parameters."""

    SLOW = "1"


@both
def test_an_enumeration_is_written_by_name(L: Any, tmp_path: Path) -> None:
    saving = importlib.import_module(f"{L.__name__}.core.saving")
    saving.save_hparams_to_yaml(tmp_path / "hparams.yaml", {"speed": Speed.SLOW, "size": 3})
    assert saving.load_hparams_from_yaml(tmp_path / "hparams.yaml") == {"speed": "SLOW", "size": 3}


@both
def test_texts_that_look_like_numbers_are_texts_to_each_reader(L: Any, tmp_path: Path) -> None:
    given = {"lr": "1e-4", "nested": {"steps": "1_000", "end": "nan", "name": "e-4"}, "decay": 1e-4, "many": ["2e3", 2]}
    logger = L.loggers.CSVLogger(tmp_path)
    logger.log_hyperparams(given)
    logger.save()
    importlib.import_module(f"{L.__name__}.core.saving").save_hparams_to_yaml(tmp_path / "saved.yaml", given)
    for file in (Path(logger.log_dir, "hparams.yaml"), tmp_path / "saved.yaml"):
        assert OmegaConf.to_container(OmegaConf.load(file)) == given == yaml.safe_load(file.read_text())


def test_a_logger_that_is_none_is_refused_at_once() -> None:
    mock = MagicMock(name="logger")
    del mock.__iter__  # it still answers to any index
    with pytest.raises(ConfigurationError, match="is no Logger"):
        ours.Trainer(**{**QUIET, "logger": mock})


@both
def test_lists_in_a_mapping_are_read_at_once(L: Any, tmp_path: Path) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch)
        return self.net[0].weight.sum()

    project = module(L, training_step=training_step)
    trainer(L, tmp_path).fit(project, {"a": [0, 1], "b": [2, 3]})
    assert project.seen == [{"a": 0, "b": 2}, {"a": 1, "b": 3}]
    combined = importlib.import_module(f"{L.__name__}.utilities").CombinedLoader({"a": [0, 1], "b": [[2], [3]]})
    assert combined.flattened == [[0, 1], [2], [3]]


@both
def test_no_loader_is_asked_for_that_nobody_reads(L: Any, tmp_path: Path) -> None:
    def train_dataloader(self: Any) -> Any:
        self.seen.append("asked")
        return loader()

    project = module(L, train_dataloader=train_dataloader)
    at_hand = trainer(L, tmp_path, limit_train_batches=0)
    at_hand.fit(project)
    assert (project.seen, at_hand.num_training_batches) == ([], float("inf"))


@both
def test_what_a_script_does_on_sigterm_is_done(L: Any, tmp_path: Path) -> None:
    called: list[int] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    stopped = importlib.import_module(f"{L.__name__}.utilities.exceptions").SIGTERMException
    former = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        at_hand = trainer(L, tmp_path)
        assert not at_hand.received_sigterm
        with pytest.raises(stopped):
            at_hand.fit(module(L, training_step=training_step), loader())
        assert at_hand.received_sigterm and called == [signal.SIGTERM]
        at_hand.validate(module(L, validation_step=lambda *_: None), loader())
        assert called == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, former)
    assert isinstance(stopped(), stopped)


def test_what_a_script_with_several_workers_does_on_sigterm_is_done(tmp_path: Path) -> None:
    here, called = os.getpid(), []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.trainer.is_global_zero and self.trainer.global_step == 1:
            os.kill(here, signal.SIGTERM)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    former = signal.signal(signal.SIGTERM, handler := lambda *_: called.append(os.getpid()))
    try:
        with pytest.raises(ours.utilities.exceptions.SIGTERMException):
            trainer(ours, tmp_path, devices=2, max_epochs=-1).fit(module(ours, training_step=training_step), loader())
        assert called == [here]
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, former)


@both
def test_loggers_may_be_taken_away(L: Any, tmp_path: Path) -> None:
    at_hand = trainer(L, tmp_path)
    at_hand.loggers = None
    assert (at_hand.loggers, at_hand.logger) == ([], None)


@both
@pytest.mark.parametrize(("limits", "done"), [({"max_steps": 0}, True), ({"max_epochs": 0}, True), ({}, False)])
def test_a_fit_to_come_may_be_done(L: Any, tmp_path: Path, limits: dict[str, int], done: bool) -> None:
    assert trainer(L, tmp_path, **limits).fit_loop.done is done


@both
def test_a_module_within_another_one_asks_the_same_trainer(L: Any, tmp_path: Path) -> None:
    class Inner(L.LightningModule):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return x * (1 + self.trainer.global_step + self.global_step + self.current_epoch)

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.seen.append(float(self.inner(torch.ones(()))))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    project = module(L, training_step=training_step)
    project.inner = Inner()
    trainer(L, tmp_path, max_epochs=2).fit(project, loader(8, 4))
    assert project.seen == [1.0, 3.0, 6.0, 8.0]


@both
def test_what_a_strategy_has_is_known_before_a_fit(L: Any, tmp_path: Path) -> None:
    plugins = importlib.import_module(f"{L.__name__}.plugins")
    alone, several = trainer(L, tmp_path), trainer(L, tmp_path, strategy="ddp", devices=2)
    for at_hand in alone, several:
        assert type(at_hand.strategy.checkpoint_io) is plugins.TorchCheckpointIO
    assert not hasattr(alone.strategy, "cluster_environment")
    environment = several.strategy.cluster_environment
    assert type(environment) is importlib.import_module(f"{L.__name__}.plugins.environments").LightningEnvironment
    assert (environment.main_address, environment.creates_processes_externally) == ("127.0.0.1", False)


@both
def test_a_strategy_writes_by_what_it_is_given(L: Any, tmp_path: Path) -> None:
    written: list[str] = []

    class Own(importlib.import_module(f"{L.__name__}.plugins").TorchCheckpointIO):  # type: ignore[misc]
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            written.append(Path(path).name)
            super().save_checkpoint(checkpoint, path)

    at_hand = trainer(L, tmp_path)
    at_hand.strategy.checkpoint_io = Own()
    at_hand.fit(module(L), loader())
    at_hand.save_checkpoint(tmp_path / "x.ckpt")
    assert written == ["x.ckpt"]


@both
def test_whether_a_batch_only_gathers_gradients_can_be_asked(L: Any, tmp_path: Path) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.seen.append(self.trainer.fit_loop.epoch_loop._should_accumulate())
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    project, at_hand = module(L, training_step=training_step), trainer(L, tmp_path, accumulate_grad_batches=2)
    assert not at_hand.fit_loop.epoch_loop._should_accumulate()
    at_hand.fit(project, loader(18, 4))
    assert project.seen == [True, False, True, False, False]
    assert not at_hand.fit_loop.epoch_loop._should_accumulate()


def test_a_loader_without_a_batch_cannot_begin_again(tmp_path: Path) -> None:
    """Lightning ends at once and trains nothing."""
    loaders = [loader(8, 4), DataLoader(TensorDataset(torch.zeros(0, 6)))]
    with pytest.raises(ConfigurationError, match="loader 1 of those that are read at once has no batch, and so none"):
        list(ours.utilities.CombinedLoader(loaders, "max_size_cycle"))
    with pytest.raises(ConfigurationError, match="loader 1 of those that are read at once has no batch, and so none"):
        trainer(ours, tmp_path).fit(module(ours), loaders)
    assert [items[0][1] for items in ours.utilities.CombinedLoader(loaders, "max_size")] == [None, None]


@pytest.mark.parametrize(("L", "workers"), [(theirs, 1), (ours, 1), (ours, 2)])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_stage_without_a_batch_is_passed_over(
    L: Any, workers: int, several: bool, stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("a hook of a stage without a batch was called")

    name = "validation" if stage == "validate" else stage
    hooks = dict.fromkeys(f"on_{name}_{moment}" for moment in ("start", "epoch_start", "epoch_end", "end"))
    project = module(L, **dict.fromkeys(hooks, refused), **{f"{name}_step": refused})
    empty = DataLoader(TensorDataset(torch.zeros(0, 6)))
    at_hand = trainer(L, tmp_path, devices=workers, strategy="ddp" if workers > 1 else "auto")
    assert getattr(at_hand, stage)(project, [empty, empty] if several else empty) == []
    assert "metric" not in capsys.readouterr().out


def test_a_rank_without_a_batch_goes_along_with_one_that_has_some(tmp_path: Path) -> None:
    def test_dataloader(self: Any) -> Any:
        return DataLoader(TensorDataset(torch.ones(2 * self.global_rank, 6)))

    def test_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("ones", batch[0].mean(), sync_dist=True)

    project = module(ours, test_dataloader=test_dataloader, test_step=test_step)
    at_hand = trainer(ours, tmp_path, devices=2, strategy="ddp", use_distributed_sampler=False)
    assert at_hand.test(project, verbose=False) == [{"ones": 1.0}]


@pytest.mark.parametrize(("L", "workers"), [(theirs, 1), (ours, 2)])
def test_batchnorm_is_as_the_trainer_was_made(
    L: Any, workers: int, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Lightning's Trainer does not look at the attribute; torch has no SyncBatchNorm for CPUs that could be seen."""

    class Look(L.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.seen = type(pl_module.norm).__name__

    look, project = Look(), module(L)
    project.norm = nn.BatchNorm1d(2)
    project.norm.requires_grad_(False)
    made = trainer(L, tmp_path, devices=workers, callbacks=[look], max_steps=1)
    made.sync_batchnorm = True
    told = [str(one.message) for one in recwarn if "sync_batchnorm" in str(one.message)]
    assert len(told) == (L is ours)
    made.fit(project, loader())
    assert look.seen == "BatchNorm1d"


@both
def test_a_data_module_prints_the_sizes_of_its_data(L: Any) -> None:
    class Data(L.LightningDataModule):  # type: ignore[misc, name-defined]
        def setup(self, stage: str) -> None:
            self.train = loader(10).dataset

        def train_dataloader(self) -> Any:
            return DataLoader(self.train, batch_size=2)

        def val_dataloader(self) -> Any:
            return [DataLoader(self.train), DataLoader(Endless())]

    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    data = Data()
    assert str(data).split(os.linesep)[0] == "{Train dataloader: None}"
    data.setup("fit")
    assert str(data).split(os.linesep) == [
        "{Train dataloader: size=10}",
        "{Validation dataloader: 1. size=10 ; 2. size=NA}",
        "{Test dataloader: None}",
        "{Predict dataloader: None}",
    ]


@both
def test_options_of_log_dict_have_an_order(L: Any, tmp_path: Path) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"a": 1.0, "b": 2.0}, True, False, False, True)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    fit = trainer(L, tmp_path)
    fit.fit(module(L, training_step=training_step), loader())
    assert fit.progress_bar_metrics == {"a": 1.0, "b": 2.0} and set(fit.callback_metrics) == {"a", "b"}


@both
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_a_search_without_a_trial_keeps_the_first_size(L: Any, mode: str, tmp_path: Path) -> None:
    data = TensorDataset(torch.ones(40, 6), torch.zeros(40, dtype=torch.long))
    searched = module(L, train_dataloader=lambda self: DataLoader(data, self.batch_size))
    searched.batch_size = 3
    size = L.tuner.Tuner(trainer(L, tmp_path)).scale_batch_size(searched, mode=mode, init_val=20, max_trials=0)
    assert size == searched.batch_size == (20 if mode == "power" else 19)


@both
def test_one_limit_is_each_loaders(L: Any) -> None:
    combined = L.utilities.CombinedLoader([range(5), range(3)], "sequential")
    combined.limits = 2
    assert combined.limits == [2, 2] and len(list(combined)) == 4
    with pytest.raises(ValueError, match="limits"):
        combined.limits = [1]


@both
def test_arguments_that_may_be_left_out(L: Any) -> None:
    """Of methods that a project calls itself, or by ``super()``."""
    left_out = inspect.signature(L.callbacks.BatchSizeFinder.setup).parameters["stage"]
    assert left_out.default is None
    assert inspect.signature(L.loggers.MLFlowLogger.finalize).parameters["status"].default == "success"


@both
def test_a_project_may_ask_how_much_of_a_device_is_in_use(L: Any, tmp_path: Path) -> None:
    fit = trainer(L, tmp_path)
    found = fit.accelerator.get_device_stats(torch.device("cpu"))
    assert set(found) == {"cpu_vm_percent", "cpu_percent", "cpu_swap_percent"}
    assert all(0.0 <= value <= 100.0 for value in found.values())


def test_what_configure_optimizers_knows_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """A callback or the data may decide which parameters are trained, and how fast."""

    def run(L: Any) -> list[str]:
        calls: list[str] = []

        class Keeper(L.Callback):  # type: ignore[misc, name-defined]
            rate = 0.1

            def state_dict(self) -> dict[str, Any]:
                return {"rate": 0.3}

            def load_state_dict(self, state_dict: dict[str, Any]) -> None:
                self.rate = state_dict["rate"]
                calls.append("callback")

            def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
                calls.append("callback's checkpoint")

        class Data(L.LightningDataModule):  # type: ignore[misc, name-defined]
            def train_dataloader(self) -> Any:
                return loader()

            def state_dict(self) -> dict[str, Any]:
                return {"seen": 3}

            def load_state_dict(self, state_dict: dict[str, Any]) -> None:
                self.seen = state_dict["seen"]
                calls.append("data")

        class Module(L.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.net = net()

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

            def configure_optimizers(self) -> Any:
                (keeper,) = [one for one in self.trainer.callbacks if isinstance(one, Keeper)]
                calls.append(f"optimizer {keeper.rate} {getattr(self.trainer.datamodule, 'seen', None)}")
                return torch.optim.SGD(self.parameters(), lr=keeper.rate)

            def on_fit_start(self) -> None:
                calls.append("fit")

        path = tmp_path / f"{L.__name__}.ckpt"
        for number in (1, 2):
            trainer = L.Trainer(**{**QUIET, "logger": False, "max_epochs": number, "callbacks": [Keeper()]})
            trainer.fit(Module(), datamodule=Data(), ckpt_path=path if number == 2 else None)
            trainer.save_checkpoint(path)
        calls.append(str(trainer.optimizers[0].param_groups[0]["lr"]))
        return calls

    expected, found = run(theirs), run(ours)
    shown = "callback's checkpoint"  # ours is called before the data, so that it may change what that takes
    assert [one for one in found if one != shown] == [one for one in expected if one != shown]


def test_a_prediction_is_in_the_order_of_the_epochs_that_were_trained(tmp_path: Path) -> None:
    """A ``DistributedSampler`` of the project's own shuffles by itself, as it does for a test."""

    def run(L: Any, strategy: str) -> list[Any]:
        class Module(L.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Linear(1, 1)

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                return self.net(batch[0]).sum()

            def predict_step(self, batch: Any, batch_idx: int) -> Any:
                return batch[0].flatten().tolist()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        def shuffled() -> Any:
            data = TensorDataset(torch.arange(8.0).view(8, 1))
            return DataLoader(data, sampler=DistributedSampler(data, num_replicas=1, rank=0, seed=1), batch_size=4)

        options = {"devices": 1, "accelerator": "cpu", "strategy": strategy, "use_distributed_sampler": False}
        trainer = L.Trainer(**{**QUIET, **options, "logger": False, "max_epochs": 3, "default_root_dir": tmp_path})
        found = [trainer.predict(Module(), shuffled())]
        trainer.fit(Module(), shuffled())
        return [*found, trainer.predict(Module(), shuffled())]

    expected = run(theirs, "auto")
    assert expected[0] != expected[1]
    assert run(ours, "auto") == run(ours, "ddp") == expected


@both
def test_the_folder_of_a_projects_own_logger_is_where_it_saves(L: Any, tmp_path: Path) -> None:
    loggers = importlib.import_module(f"{L.__name__}.loggers")

    class Own(loggers.Logger):  # type: ignore[misc, name-defined]
        name, version, save_dir, log_dir = "name", "version", "below", "below/name/version"
        log_metrics = log_hyperparams = Mock()

    assert trainer(L, tmp_path, logger=Own()).log_dir == "below"
    csv = loggers.CSVLogger(str(tmp_path), name="a", version=3)
    assert trainer(L, tmp_path, logger=csv).log_dir == str(tmp_path / "a" / "version_3")
    assert trainer(L, tmp_path, logger=False).log_dir == str(tmp_path)


@both
@pytest.mark.parametrize("name", ["training", "validating", "testing", "predicting", "sanity_checking"])
def test_what_a_trainer_is_doing_can_be_set(L: Any, name: str, tmp_path: Path) -> None:
    at_hand = trainer(L, tmp_path)
    for value in (True, False):
        setattr(at_hand, name, value)
        assert getattr(at_hand, name) is value is (at_hand.state.stage is not None)
        assert at_hand.evaluating is (value and name not in ("training", "predicting"))
    at_hand.training = True
    setattr(at_hand, "predicting", False)  # noqa: B010  (leaves what is not predicting)
    assert at_hand.training
    with pytest.raises(AttributeError):
        at_hand.evaluating = True


@both
def test_a_callback_may_evaluate_within_a_fit(L: Any, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Evaluating(L.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            trainer.testing = True
            seen.append((trainer.training, trainer.evaluating, trainer.state.stage.value))
            trainer.training = True

    at_hand = trainer(L, tmp_path, callbacks=[Evaluating()])
    at_hand.fit(module(L), loader())
    assert set(seen) == {(False, True, "test")} and len(seen) == at_hand.global_step


@both
def test_letters_that_may_mean_yes_or_no_are_quoted(L: Any, tmp_path: Path) -> None:
    logger = L.loggers.CSVLogger(tmp_path)
    logger.log_hyperparams({"n": 1, "y": "N", "no": "Y", "none": "yn"})
    logger.save()
    written = Path(logger.log_dir, "hparams.yaml").read_bytes()
    assert written.splitlines() == [b"'n': 1", b"'y': 'N'", b"'no': 'Y'", b"none: yn"]


@both
def test_the_bars_of_a_run_can_be_looked_at_after_it(L: Any, tmp_path: Path) -> None:
    bar = L.callbacks.RichProgressBar(console_kwargs={"force_terminal": True, "width": 100})
    assert bar.progress is None
    at_hand = trainer(L, tmp_path, callbacks=[bar], enable_progress_bar=True)
    for _ in range(2):
        at_hand.fit(module(L), loader())
        assert bar.progress is not None and not bar.progress.live.is_started


@both
@pytest.mark.parametrize("kind", ["anything", "as a callback", "as an object of one"])
def test_a_mock_may_be_a_callback(L: Any, kind: str, tmp_path: Path) -> None:
    spec = {"anything": None, "as a callback": L.Callback, "as an object of one": L.Callback()}[kind]
    mock = Mock(spec=spec)
    at_hand = trainer(L, tmp_path, callbacks=[mock])
    at_hand.fit(module(L), loader())
    assert mock in at_hand.callbacks
    called = [call[0] for call in mock.method_calls]
    assert called[0] == "setup" and called[-1] == "teardown"
    assert called.count("on_train_batch_end") == called.count("on_before_optimizer_step") == at_hand.global_step > 0


def test_what_has_some_hooks_of_a_callback_is_none(tmp_path: Path) -> None:
    class Half:
        def on_train_start(self, trainer: Any, pl_module: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="callbacks: Half is no Callback, derive it from one"):
        trainer(ours, tmp_path, callbacks=[Half()])
