"""What published projects do besides: streams that see the run, callbacks and loggers and bars of their own."""

from __future__ import annotations

import csv
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
import yaml
from omegaconf import OmegaConf
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset
from torchmetrics import MeanMetric

import drivetrain
import drivetrain.lightning as ours
from drivetrain.errors import ConfigurationError
from drivetrain.launch import start_method
from drivetrain.lightning.callbacks.progress.tqdm_progress import Tqdm, convert_inf
from drivetrain.optimizer import parse_configuration
from tests.lightning_parts.both import classifier, compare, loader, trainer, weights


class Rollouts(IterableDataset[Any]):
    """Draws each sample when it is read, and notes when that was; ``says`` is the length that it claims to have."""

    def __init__(self, seen: list[Any], samples: int) -> None:
        self.seen, self.samples = seen, samples

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.samples):
            self.seen.append(f"read {number}")
            x = torch.randn(3)
            yield x, int(x.sum() > 0)


class Told(Rollouts):
    says = 12

    def __len__(self) -> int:
        return self.says


@pytest.mark.parametrize("kind", ["without a length", "with a length", "shorter than told", "limited"])
@pytest.mark.parametrize(("reload", "accumulated"), [(0, 1), (1, 1), (0, 3), (0, 2)])
def test_streams_are_read_at_the_same_moments(tmp_path: Path, kind: str, reload: int, accumulated: int) -> None:
    def run(L: Any) -> dict[str, Any]:
        seen: list[Any] = []

        class Diary(L.Callback):  # type: ignore[misc, name-defined]
            def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
                seen.append("epoch")

            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                seen.append(f"batch {batch_idx} {trainer.is_last_batch}")

            def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
                seen.append(f"step {trainer.global_step}")

            def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
                seen.append("validation")

        torch.manual_seed(3)
        data = (Told if "told" in kind or "with a" in kind else Rollouts)(seen, 8 if "shorter" in kind else 12)
        module = classifier(L, train_dataloader=lambda self: DataLoader(data, batch_size=4))
        limit = {"limit_train_batches": 2} if kind == "limited" else {}
        limit["accumulate_grad_batches"] = accumulated
        fit = trainer(L, tmp_path, callbacks=[Diary()], max_epochs=3, reload_dataloaders_every_n_epochs=reload, **limit)
        fit.fit(module, val_dataloaders=loader(8))
        whole = "short" in kind or (2 if kind == "limited" else 3) % accumulated == 0
        weighed = weights(module) if whole else None  # of a short last window Lightning's gradient is too small
        return {"seen": seen, "weights": weighed, "batches": str(fit.num_training_batches)}

    assert "read 0" in compare(run)["seen"]


class Fewer:
    """Batches of no loader of torch's: four, though it says that there are six."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(ROWS, batch_size=2))

    def __len__(self) -> int:
        return 6


class FewerSamples(SequentialSampler):
    """Eight of twelve."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class FewerBatches(BatchSampler):
    """Says six."""

    def __len__(self) -> int:
        return 6


class Ending(Dataset[Any]):
    """Has no more than eight samples, and says twelve."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index >= 8:
            raise StopIteration
        return ROWS[index]


ROWS = list(Rollouts([], 8))
LONGER = ROWS + ROWS[:4]
SHORTER: dict[str, Callable[[], Any]] = {
    "iterable": Fewer,
    "sampler": lambda: DataLoader(LONGER, batch_size=2, sampler=FewerSamples(LONGER)),  # type: ignore[arg-type]
    "batch sampler": lambda: DataLoader(
        LONGER,  # type: ignore[arg-type]
        batch_sampler=FewerBatches(FewerSamples(LONGER), 2, False),
    ),
    "data set": lambda: DataLoader(Ending(), batch_size=2),
    "among several": lambda: {"a": Fewer(), "b": loader(4, 2)},
    "stream": lambda: DataLoader(Told([], 8), batch_size=2),
}


@pytest.mark.parametrize("kind", SHORTER)
@pytest.mark.parametrize("accumulated", [1, 3, 4])
def test_loaders_that_give_less_than_they_said_end_the_epoch(tmp_path: Path, kind: str, accumulated: int) -> None:
    def run(L: Any) -> dict[str, Any]:
        seen: list[Any] = []

        class Diary(L.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                seen.append(["batch", batch_idx, trainer.is_last_batch, trainer.global_step])

            def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                seen.append(["validation", batch_idx, trainer.global_step])

            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
                seen.append(["epoch", trainer.current_epoch, trainer.global_step, *rates])

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            x, y = batch["a"] if isinstance(batch, dict) else batch
            return torch.nn.functional.cross_entropy(self(x), y)

        def configure_optimizers(self: Any) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        torch.manual_seed(3)
        module = classifier(L, training_step=training_step, configure_optimizers=configure_optimizers)
        fit = trainer(L, tmp_path, callbacks=[Diary()], max_epochs=3, accumulate_grad_batches=accumulated)
        fit.fit(module, SHORTER[kind](), loader(8))
        trained = [len(seen), str(fit.num_training_batches), fit.global_step, fit.current_epoch]
        evaluated = SHORTER[kind]()
        if kind != "among several":
            trained.append(fit.validate(module, evaluated, verbose=False))
        return {"seen": seen, "trained": trained, "weights": weights(module)}

    assert ["batch", 3, False, 3 // accumulated] in compare(run)["seen"]


def test_that_a_loader_gave_less_than_it_said_is_told_once(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(ours, tmp_path, max_epochs=3).fit(classifier(ours), Fewer())
    said = [str(one.message) for one in told if "len()" in str(one.message)]
    assert len(said) == 1 and said[0].startswith("the loader ended after 4 of 6 batches, it is shorter than its len()")


class FewerOnOne(Fewer):
    """As many as it says on the first rank, two on the second."""

    def __iter__(self) -> Iterator[Any]:
        whole = torch.distributed.get_rank() == 0
        return iter(DataLoader(LONGER if whole else LONGER[:4], batch_size=2))  # type: ignore[arg-type]


@pytest.mark.parametrize("accumulated", [1, 3])
def test_where_one_ranks_loader_gives_less_the_epoch_ends_for_all(tmp_path: Path, accumulated: int) -> None:
    module = classifier(ours)
    fit = trainer(ours, tmp_path, strategy="ddp", devices=2, accumulate_grad_batches=accumulated, timeout=60)
    fit.fit(module, FewerOnOne())
    assert fit.current_epoch == 4 and fit.global_step == 4 * (2 if accumulated == 1 else 1)  # of two batches each


def test_a_short_window_of_a_stream_weighs_as_a_whole_one(tmp_path: Path) -> None:
    listed = list(Rollouts([], 12))

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(listed)

    def run(stream: bool) -> Any:
        module = classifier(ours)
        data: DataLoader[Any] = DataLoader(Stream() if stream else listed, batch_size=4)  # type: ignore[arg-type]
        trainer(ours, tmp_path, accumulate_grad_batches=2, max_epochs=1).fit(module, data)
        return weights(module)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(run(True), run(False))


def test_what_is_written_as_csv_is_the_same_byte_by_byte(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
            self.log_dict({"z": 0.1, "a": torch.tensor(0.3)}, batch_size=4)

        logger = L.loggers.CSVLogger(tmp_path / L.__name__)
        rates = L.callbacks.LearningRateMonitor()
        fit = trainer(L, tmp_path, logger=logger, callbacks=[rates], max_epochs=2, log_every_n_steps=2)
        module = classifier(L, validation_step=validation_step)
        fit.fit(module, loader(24), loader(8))
        kinds = {name: value.dtype for name, value in fit.callback_metrics.items()}
        found = fit.validate(module, loader(8), verbose=False)[0]["z"]
        same = found == float(fit.callback_metrics["z"]) == float(torch.tensor(0.1))
        # The epoch's mean, which Lightning adds up in single precision, may be another in its last digit.
        rows = [r for r in (Path(logger.log_dir) / "metrics.csv").read_bytes().splitlines(True) if b"," in r[:2]]
        mean = [r for r in rows if r.split(b",")[2] and not r.split(b",")[1]]
        return {"rows": [r for r in rows if r not in mean], "kinds": kinds, "same": same}

    assert compare(run)["same"]


def test_a_monitor_that_was_never_logged_and_a_name_that_is_logged_twice(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        def twice(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("same", 1.0 * dataloader_idx, add_dataloader_idx=False)

        wrong = L.utilities.exceptions.MisconfigurationException
        cases = [
            (wrong, {"callbacks": [L.callbacks.ModelCheckpoint(monitor="none")], "enable_checkpointing": True}, {}),
            (RuntimeError, {"callbacks": [L.callbacks.EarlyStopping("none")]}, {}),
            (wrong, {}, {"validation_step": twice}),
        ]
        for error, options, parts in cases:
            val = [loader(4)] * 2 if parts else loader(4)
            with pytest.raises(error, match=r"none|same"):
                trainer(L, tmp_path, max_epochs=1, **options).fit(classifier(L, **parts), loader(), val)
        return {}

    compare(run)


def test_states_read_as_lightnings_do(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        told: list[str] = []

        class Told(L.Callback):  # type: ignore[misc, name-defined]
            def setup(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
                state = trainer.state
                words = (state.fn, state.status, state.stage, state.stage.dataloader_prefix)
                told.append(f"{state} {state.fn == 'fit'} {state.status == 'RUNNING'} {state.status.stopped} {words}")

            on_sanity_check_start = on_train_start = on_validation_start = on_train_epoch_end = teardown = setup
            on_test_end = on_predict_batch_end = on_fit_start = on_fit_end = on_validation_end = setup

        fit, module = trainer(L, tmp_path, callbacks=[Told()], max_epochs=1, num_sanity_val_steps=1), classifier(L)
        before = str(fit.state)
        fit.fit(module, loader(), loader(8))
        told.append(f"{before} {fit.state} {fit.state.fn} {fit.state.status} {fit.state.finished}")
        fit.validate(module, loader(8), verbose=False)
        fit.predict(module, loader(8))
        return {"told": told, "value": [fit.state.fn.value, fit.state.status.value, hash(fit.state.fn)]}

    assert "TrainerFn.FITTING TrainerStatus.FINISHED True" in "".join(compare(run)["told"])


def test_callbacks_log_and_metrics_keep_their_order(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        class Logs(L.Callback):  # type: ignore[misc, name-defined]
            @property
            def state_key(self) -> str:
                return self._generate_state_key(of="loss")

            def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                self.log("z", 1.0)
                self.log_dict({"y": 2.0, "a": 3.0})

        def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
            self.accuracy(self(batch[0]), batch[1])
            self.log_dict({"val": 0.5, "accuracy": self.accuracy, "b": 1.0})

        module = classifier(L, validation_step=validation_step)
        module.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)
        fit = trainer(L, tmp_path, callbacks=[Logs()], max_epochs=1)
        fit.fit(module, loader(), loader(9))
        found = fit.validate(module, loader(9), verbose=False)[0]
        key = fit.callbacks[0].state_key if isinstance(fit.callbacks[0], Logs) else ""
        return {"found": found, "order": list(found), "fit": list(fit.callback_metrics), "key": key.split(".")[-1]}

    assert compare(run)["order"] == ["val", "accuracy", "b", "z", "y", "a"]


def test_loaders_read_at_once_are_counted_one_by_one(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("rows", float(sum(len(part[0]) for part in batch.values() if part)), batch_size=1)

        both = L.utilities.CombinedLoader({"a": loader(8), "b": loader(13)}, "max_size")
        fit = trainer(L, tmp_path, max_epochs=1)
        fit.fit(classifier(L, validation_step=validation_step), loader(), both)
        kind = type(fit.val_dataloaders).__name__
        return {"batches": fit.num_val_batches, "kind": kind, "rows": float(fit.callback_metrics["rows"])}

    assert compare(run)["batches"] == [2, 4]


def test_what_lightning_only_warns_of(tmp_path: Path) -> None:
    def configured(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "opt_idx": 0}
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "interval": "epoch"}

    def run(L: Any) -> dict[str, Any]:
        module = classifier(L, configure_optimizers=configured)
        trainer(L, tmp_path, max_epochs=2).fit(module, loader())
        return {"rates": module.rates}

    compare(run)
    with pytest.warns(RuntimeWarning, match="unknown scheduler key 'opt_idx'"):  # Lightning's kind, too
        parse_configuration(configured(classifier(ours)), warns=True)
    with pytest.raises(ConfigurationError, match="unknown key 'interval'"):
        parse_configuration(configured(classifier(ours)))


def test_a_plateau_stepped_by_hand_needs_no_monitor(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        def configured(module: Any) -> Any:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)]

        def training_step(self: Any, batch: Any, batch_idx: int) -> None:
            loss, optimizer = self(batch[0]).pow(2).mean(), self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step(1.0)

        module = classifier(L, configure_optimizers=configured, training_step=training_step)
        module.automatic_optimization = False
        trainer(L, tmp_path, max_epochs=1).fit(module, loader())
        return {"rates": module.rates}

    assert compare(run)["rates"][0][0] < 0.1


def test_loggers_of_ones_own_are_asked_to_save(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        class Held(L.loggers.logger.Logger):  # type: ignore[misc, name-defined]
            name, version = "held", "0"
            told: list[str] = []

            def log_metrics(self, metrics: Any, step: Any = None) -> None:
                self.told.append(f"{step} {sorted(metrics)}")

            def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

            def save(self) -> None:
                self.told.append("save")

        held = Held()
        trainer(L, tmp_path, logger=held, max_epochs=1, log_every_n_steps=2).fit(classifier(L), loader(), loader(9))
        return {"told": held.told}

    assert compare(run)["told"][-1] == "save"


def test_bars_of_ones_own(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        told: list[Any] = []

        class Bar(L.callbacks.TQDMProgressBar):  # type: ignore[misc, name-defined]
            def init_train_tqdm(self) -> Any:
                bar = super().init_train_tqdm()
                bar.set_description("train")
                told.append("made")
                return bar

            def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
                super().on_train_epoch_start(trainer, pl_module)
                self.train_progress_bar.set_description(f"epoch {trainer.current_epoch}")

            def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
                items = super().get_metrics(trainer, pl_module)
                items.pop("v_num", None)
                told.append(sorted(items))
                return items

            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                super().on_train_epoch_end(trainer, pl_module)
                bar = self.train_progress_bar
                told.append([bar.n, bar.total, bar.desc])

            def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
                super().on_validation_batch_start(*args, **kwargs)
                told.append([self.val_progress_bar.total, self.val_progress_bar.desc])

        options = {"enable_progress_bar": True, "num_sanity_val_steps": 1, "max_epochs": 2}
        fit = trainer(L, tmp_path, callbacks=[Bar(refresh_rate=4)], **options)
        fit.fit(classifier(L), loader(), loader(9))
        fit.test_progress = fit.validate(fit.lightning_module, loader(9), verbose=False)
        return {"told": told}

    assert [6, 6, "epoch 1: "] in compare(run)["told"]
    assert convert_inf(float("inf")) is None and convert_inf(3) == 3
    bar = Tqdm(desc="x", total=4)
    bar.set_postfix(loss=0.12345)
    bar.update(2)
    assert "x 50%|" in str(bar) and "2/4 [" in str(bar) and "loss=0.123]" in str(bar)
    with pytest.raises(TypeError, match="no bar of test"):
        _ = ours.callbacks.TQDMProgressBar().test_progress_bar


def test_what_is_logged_is_what_it_was_at_that_moment(tmp_path: Path) -> None:
    """A parameter changes with the next step, a sum that a module keeps in place with the next batch."""

    def run(L: Any) -> dict[str, Any]:
        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.seen += len(batch[0])
            self.log_dict({"seen": self.seen, "bias": self.head.bias[:1]}, on_step=True, on_epoch=True)
            return loss

        module, rows = classifier(L, training_step=training_step), []
        module.register_buffer("seen", torch.zeros(()))

        class Notes(L.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})

        fit = trainer(L, tmp_path, callbacks=[Notes()], max_epochs=2)
        fit.fit(module, loader())
        shapes = {name: value.shape for name, value in fit.callback_metrics.items()}
        found = {name: float(value) for name, value in fit.callback_metrics.items()}
        return {"rows": rows, "metrics": found, "shapes": shapes}

    compare(run)


def test_a_run_goes_on_from_between_two_epochs_as_if_undisturbed(tmp_path: Path) -> None:
    """From a file of the last epoch's end, whose plateau is still to be stepped, and from one saved after the fit."""

    def run(epochs: int, path: Path | None = None, seed: int = 0) -> Any:
        def configure_optimizers(self: Any) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val"}

        torch.manual_seed(seed)
        module = classifier(ours, configure_optimizers=configure_optimizers)
        data = DataLoader(loader().dataset, batch_size=4, shuffle=True)
        saved = ours.callbacks.ModelCheckpoint(tmp_path / str(epochs), filename="end", enable_version_counter=False)
        options: dict[str, Any] = {"callbacks": [saved], "enable_checkpointing": True, "num_sanity_val_steps": 2}
        fit = trainer(ours, tmp_path, max_epochs=epochs, **options)
        fit.fit(module, data, loader(8), ckpt_path=path)
        fit.save_checkpoint(tmp_path / "after.ckpt")
        return weights(module), module.rates

    whole, rates = run(5)
    run(3)
    after = tmp_path / "between.ckpt"
    (tmp_path / "after.ckpt").rename(after)
    for path in (tmp_path / "3/end.ckpt", after):
        found, last = run(5, path, seed=1)
        torch.testing.assert_close(found, whole, rtol=0, atol=0)
        assert last == rates[-2:] and rates[0] != rates[-1]


def test_a_resumed_run_asks_for_its_loaders_in_the_same_epochs(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        asked: list[Any] = []

        def data(which: str) -> Any:
            def dataloader(self: Any) -> Any:
                asked.append((which, self.trainer.current_epoch))
                return loader(8)

            return dataloader

        for epochs, path in ((5, None), (8, tmp_path / f"{L.__name__}/end.ckpt")):
            asked.append("a run")
            module = classifier(L, train_dataloader=data("train"), val_dataloader=data("val"))
            saved = L.callbacks.ModelCheckpoint(tmp_path / L.__name__, filename="end")
            options: dict[str, Any] = {"callbacks": [saved], "enable_checkpointing": True, "num_sanity_val_steps": 1}
            fit = trainer(L, tmp_path, max_epochs=epochs, reload_dataloaders_every_n_epochs=2, **options)
            fit.fit(module, ckpt_path=path)
        return {"asked": asked}

    assert compare(run)["asked"].count("a run") == 2


def test_a_project_may_have_an_attribute_of_its_own_called_handed_back(tmp_path: Path) -> None:
    module = classifier(ours)
    module.handed_back, module.kept = 5, 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(ours, tmp_path, strategy="ddp", devices=2, max_epochs=1).fit(module, loader())
    assert (module.handed_back, module.kept) == (5, 7)


@pytest.mark.parametrize("forked", [True, False])
def test_what_workers_noted_comes_back(forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not forked:
        monkeypatch.setattr(start_method, "why_not_fork", lambda: "this process has touched the CUDA driver")

    class Notes(ours.Callback):
        def __init__(self) -> None:
            self.rows: list[dict[str, float]] = []

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.rates.append([float(loss.detach())])
        self.seen += len(batch[0])
        return loss

    module, notes = classifier(ours, training_step=training_step), Notes()
    module.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)
    module.seen, module.table = torch.zeros(()), torch.randn(4)
    table = module.table
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "callbacks": [notes], "max_epochs": 2}
    fit = trainer(ours, tmp_path, num_sanity_val_steps=1, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit.fit(module, loader(), [loader(9), loader(17)])
    batches = (fit.num_training_batches, fit.num_val_batches, fit.num_sanity_val_batches)
    assert batches == (3, [2, 3], [1, 1]) and fit.num_test_batches == [], "as the workers counted them"
    assert len(module.rates) == 2 * (3 + 1), "a loss of each step, and rates of each epoch"
    assert module.seen > 0 and module.table is table, "what did not change is not sent back"
    known = [row["accuracy"] for row in notes.rows]
    assert len(known) == 2 and known[-1] == pytest.approx(float(fit.callback_metrics["accuracy"])), "not an epoch late"
    path, trained = tmp_path / "trained.ckpt", weights(module)
    torch.save({"state_dict": trained, "epoch": 2, "global_step": 6, "pytorch-lightning_version": "2.6.0"}, path)
    torch.nn.init.zeros_(module.head.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit.validate(module, loader(9), ckpt_path=path, verbose=False)
    assert torch.equal(module.head.weight, trained["head.weight"]), "what was validated is what the script has"


@pytest.mark.parametrize(("strategy", "freezes"), [("ddp", True), ("fsdp", False), ("local_sgd", False)])
def test_what_workers_froze_and_thawed_comes_back(strategy: str, freezes: bool, tmp_path: Path) -> None:
    """As a fit in this process leaves it: the next part of a script makes its optimizer of what is trained."""

    def on_train_start(self: Any) -> None:
        self.backbone[1].eval()
        self.backbone[0].bias.requires_grad_(not freezes)

    seen = {}
    for devices, name in ((1, "single"), (2, strategy)):
        module = classifier(ours, on_train_start=on_train_start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer(ours, tmp_path, strategy=name, devices=devices, max_epochs=1).fit(module, loader())
        trained = [key for key, parameter in module.named_parameters() if parameter.requires_grad]
        seen[name] = trained, [key for key, layer in module.named_modules() if layer.training]
    assert seen[strategy] == seen["single"] and "backbone.1" not in seen["single"][1]


def test_a_model_built_in_setup_comes_back_from_workers(tmp_path: Path) -> None:
    """With the number of classes that the data module knows once it is set up; what only a callback adds does not."""

    class Data(ours.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.classes = 2

        def train_dataloader(self) -> Any:
            return loader(8)

    class Adds(ours.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            pl_module.register_buffer("added", torch.ones(1))

    def setup(self: Any, stage: str) -> None:
        self.head = torch.nn.Linear(5, self.trainer.datamodule.classes, bias=False)

    module = classifier(ours, setup=setup)
    del module.head
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "callbacks": [Adds()], "max_epochs": 1}
    fit, before = trainer(ours, tmp_path, **options), torch.get_rng_state()
    with pytest.warns(UserWarning, match="added did not come back"):
        fit.fit(module, datamodule=Data())
    fit.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert float(fit.callback_metrics["loss"]) > 0 and module.head.weight.shape == (2, 5)
    assert module.head.weight.is_leaf and torch.equal(torch.get_rng_state(), before), "nothing is drawn for it"


def test_what_scripts_ask_of_the_trainer(tmp_path: Path) -> None:
    """Words and moments that scripts look at: stages as hooks are told them, hyper-parameters whatever ``self`` is
    called, gradients in saving hooks, limits of a Trainer without extras, a loader drawn from by a fit at its limit."""

    def run(L: Any) -> dict[str, Any]:
        told: list[Any] = []

        class Told(L.Callback):  # type: ignore[misc, name-defined]
            def setup(self, trainer: Any, *rest: Any, stage: Any) -> None:
                told.append((str(stage), stage.value, stage == "fit"))

            def teardown(self, trainer: Any, *rest: Any, **named: Any) -> None:
                told.append([str(stage) for stage in named.values()])

            def on_save_checkpoint(self, *args: Any) -> None:
                told.append(torch.is_grad_enabled())

        class Named(L.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(this, width: int, *, depth: int = 2) -> None:
                super().__init__()
                this.save_hyperparameters()

        torch.manual_seed(1)
        module, callbacks = classifier(L), OmegaConf.create([Told()], flags={"allow_objects": True})
        fit = trainer(L, tmp_path, callbacks=callbacks, max_epochs=1, num_sanity_val_steps=-1)
        asked = fit.num_sanity_val_steps
        shuffled = DataLoader(loader(24).dataset, batch_size=4, shuffle=True)
        for _ in range(2):  # the second has nothing to do, and draws what it would have begun with
            fit.fit(module, shuffled, loader(9))
        fit.save_checkpoint(tmp_path / "after.ckpt")
        fit.fit_loop.max_epochs = 3
        fit.fit(module, shuffled, loader(9))
        fit.logger = None
        bare = {"logger": None, "enable_checkpointing": None, "num_sanity_val_steps": None}
        return {
            "told": told,
            "hyper-parameters": dict(Named(3).hparams),
            "weights": weights(module),
            "limits": (str(asked), trainer(L, tmp_path, fast_dev_run=1).fast_dev_run, fit.logger, fit.loggers),
            "unlogged": trainer(L, tmp_path, barebones=True, **bare).log_every_n_steps,
        }

    found = compare(run)
    assert found["hyper-parameters"] == {"width": 3, "depth": 2}
    assert found["told"][0] == ("TrainerFn.FITTING", "fit", True)
    assert found["unlogged"] == 0
    with pytest.raises(TypeError, match="no argument 'gpus'"):
        ours.Trainer(gpus=1)
    with pytest.raises(ConfigurationError, match="both given"):
        trainer(ours, tmp_path).fit(classifier(ours), loader(), datamodule=ours.LightningDataModule())


def test_helpers_that_scripts_import() -> None:
    def run(L: Any) -> dict[str, Any]:
        utilities, module = L.utilities, classifier(L)
        overridden = utilities.model_helpers.is_overridden
        utilities.memory.garbage_collection_cuda()
        errors = (RuntimeError("CUDA out of memory."), RuntimeError("other"))
        return {
            "overridden": [overridden(name, module) for name in ("training_step", "on_train_start")],
            "of what": (overridden("setup", None), overridden("setup", L.Callback())),
            "least gain": [L.callbacks.EarlyStopping("x", 0.2, mode=mode).min_delta for mode in ("min", "max")],
            "checks": callable(L.callbacks.EarlyStopping._run_early_stopping_check),
            "out of memory": [utilities.memory.is_oom_error(error) for error in errors],
        }

    assert compare(run)["overridden"] == [True, False]
    with pytest.raises(ValueError, match="pass it as parent"):
        ours.utilities.is_overridden("x", object())


def test_counts_of_schedules_are_those_of_lightning(tmp_path: Path) -> None:
    """And half precision is shown as torch's default type."""

    def configure(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def run(L: Any) -> dict[str, Any]:
        module = classifier(L, configure_optimizers=configure)
        saves = L.callbacks.ModelCheckpoint(dirpath=tmp_path / L.__name__, save_weights_only=True)
        fit = trainer(L, tmp_path, callbacks=[saves], max_epochs=2, enable_checkpointing=None, precision="bf16-true")
        fit.fit(module, loader(24))
        saved = torch.load(saves.best_model_path, weights_only=False)
        return {
            "schedules": saved["loops"]["fit_loop"]["epoch_loop.scheduler_progress"],
            "shown": {name: str(value.dtype) for name, value in fit.callback_metrics.items()},
        }

    assert compare(run)["schedules"]["total"]["completed"] == 12


def test_a_module_compiled_whole_and_hooks_that_nothing_calls_any_more(tmp_path: Path) -> None:
    module, plain = classifier(ours), classifier(ours)
    calls: list[int] = []

    def backend(graph: Any, example: Any) -> Any:
        calls.append(1)
        return graph.forward

    fit = trainer(ours, tmp_path, max_epochs=1)
    fit.fit(torch.compile(module, backend=backend), loader(24))
    trainer(ours, tmp_path, max_epochs=1).fit(plain, loader(24))
    assert calls and fit.lightning_module is module
    assert all(torch.allclose(value, weights(plain)[name]) for name, value in weights(module).items())
    old = classifier(ours, validation_epoch_end=lambda self, outputs: None)
    with pytest.raises(
        NotImplementedError, match=r"validation_epoch_end, which nothing calls.*on_validation_epoch_end"
    ):
        trainer(ours, tmp_path).fit(old, loader())


@pytest.mark.parametrize("name", ["DeviceStatsMonitor", "ThroughputMonitor"])
def test_what_is_measured_in_validation_is_written_when_lightning_writes_it(tmp_path: Path, name: str) -> None:
    def run(L: Any) -> dict[str, Any]:
        given = {"batch_size_fn": lambda batch: len(batch[0]), "window_size": 3} if name == "ThroughputMonitor" else {}
        logger = L.loggers.CSVLogger(tmp_path / L.__name__)
        callbacks, more = [getattr(L.callbacks, name)(**given)], {"num_sanity_val_steps": 2, "log_every_n_steps": 2}
        fit = trainer(L, tmp_path, callbacks=callbacks, logger=logger, max_epochs=2, **more)
        fit.fit(classifier(L), loader(24), loader(20))
        rows = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()))
        return {
            "rows": [(row["step"], sorted(key for key, value in row.items() if value)) for row in rows],
            "logged": sorted(fit.logged_metrics),
        }

    assert any("validat" in key for _, keys in compare(run)["rows"] for key in keys)


def test_what_is_written_to_loggers_where_nothing_is_logged(tmp_path: Path) -> None:
    """The folder is made in any case, and its hyper-parameters stay those of the first fit."""

    def run(L: Any) -> dict[str, Any]:
        logger = L.loggers.TensorBoardLogger(tmp_path / L.__name__)
        for width in (3, 4):
            module = classifier(L)
            module.save_hyperparameters({"width": width})
            trainer(L, tmp_path, logger=logger, max_epochs=1).validate(module, loader(), verbose=False)
            trainer(L, tmp_path, logger=logger, max_epochs=0).fit(module, loader())
        folder = Path(logger.log_dir)
        return {
            "files": sorted({path.name.split(".")[0] for path in folder.iterdir()}),
            "yaml": (folder / "hparams.yaml").read_text(),
        }

    assert "hparams" in compare(run)["files"]


def test_tables_whose_keys_are_numbers_are_written_with_numbers(tmp_path: Path) -> None:
    """A vocabulary by number (``id_to_word``), as models of language save it."""

    def run(L: Any) -> dict[str, Any]:
        module = classifier(L)
        module.save_hyperparameters({"word": {0: "<pad>", 1: "dog"}, "deep": [{2.5: {True: "yes"}}]})
        for logger in (kind(tmp_path / L.__name__) for kind in (L.loggers.TensorBoardLogger, L.loggers.CSVLogger)):
            trainer(L, tmp_path, logger=logger, max_epochs=1).fit(module, loader())
        paths = sorted((tmp_path / L.__name__).rglob("hparams.yaml"))
        return {"written": [yaml.safe_load(path.read_text()) for path in paths]}

    one = {"word": {0: "<pad>", 1: "dog"}, "deep": [{2.5: {True: "yes"}}]}
    assert compare(run)["written"] == [one, one]


def test_hyper_parameters_that_a_project_puts_in_by_hand(tmp_path: Path) -> None:
    """``self.hparams.update(vars(args))`` without ``save_hyperparameters``: a checkpoint has no name for them."""

    def run(L: Any) -> dict[str, Any]:
        class Data(L.LightningDataModule):
            def train_dataloader(self) -> Any:
                return loader()

        module, data = classifier(L), Data()
        module.hparams.update({"width": 3})
        data.hparams.update({"size": 4})
        fit = trainer(L, tmp_path, max_epochs=1)
        fit.fit(module, datamodule=data)
        fit.save_checkpoint(tmp_path / f"{L.__name__}.ckpt")
        file = torch.load(tmp_path / f"{L.__name__}.ckpt", weights_only=True)
        return {"keys": sorted(file.keys() - {"drivetrain"}), "of": [file[k] for k in file if "hyper_param" in k]}

    found = compare(run)
    assert found["of"] == [{"width": 3}, {"size": 4}] and not any("hparams_name" in key for key in found["keys"])


def test_what_a_batch_logged_that_was_left_out_or_failed_is_not_seen(tmp_path: Path) -> None:
    def starts(self: Any, batch: Any, batch_idx: int) -> int | None:
        self.log("tokens", float(100 * self.current_epoch + batch_idx), batch_size=4)
        return -1 if batch_idx == 3 else None

    def steps(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train", loss)
        if self.current_epoch == 1 and batch_idx == 2:
            raise ValueError("of the project")
        return loss

    def run(L: Any) -> dict[str, Any]:
        module = classifier(L, on_train_batch_start=starts, training_step=steps)
        save = L.callbacks.OnExceptionCheckpoint(tmp_path / L.__name__)
        seen: list[Any] = []

        class Diary(L.Callback):  # type: ignore[misc, name-defined]
            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                seen.append([dict(trainer.callback_metrics), dict(trainer.logged_metrics)])

        fit = trainer(L, tmp_path, callbacks=[save, Diary()], max_epochs=2, enable_checkpointing=True)
        with pytest.raises(ValueError, match="of the project"):
            fit.fit(module, loader())
        seen.append([dict(fit.callback_metrics), dict(fit.logged_metrics)])
        return {
            str(number): [{k: float(v) for k, v in known.items()} for known in both] for number, both in enumerate(seen)
        }

    compare(run)


def test_a_run_that_stopped_early_goes_on_when_it_is_resumed(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        seen: list[Any] = []
        for epochs, resumed in ((5, None), (5, "last.ckpt"), (3, "last.ckpt")):
            root = tmp_path / L.__name__
            stop = L.callbacks.EarlyStopping("val", patience=1, min_delta=10.0)
            save = L.callbacks.ModelCheckpoint(root, save_last=True)
            fit = trainer(L, root, callbacks=[stop, save], enable_checkpointing=True, max_epochs=epochs)
            module = classifier(L)
            fit.fit(module, loader(), loader(8), ckpt_path=resumed and root / resumed)
            seen.append([fit.current_epoch, fit.global_step, fit.should_stop, stop.wait_count, stop.stopped_epoch])
            seen.append(weights(module))
        return {"seen": seen}

    found = compare(run)["seen"]
    assert found[2][0] == found[0][0] + 1


class Graphs:
    """A batch of an own kind, as of graphs: it gives its parts by name, and is no mapping."""

    def __init__(self, samples: list[Any]) -> None:
        self.x = torch.stack([x for x, _ in samples])
        self.y = torch.stack([y for _, y in samples])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from (("x", self.x), ("y", self.y))

    def __getitem__(self, part: int) -> torch.Tensor:
        return (self.x, self.y)[part]

    def to(self, *args: Any, **kwargs: Any) -> Graphs:
        return self


def test_a_batch_of_an_own_kind_weighs_as_many_samples_as_its_parts_have(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            self.log("seen", float(batch_idx), on_step=False, on_epoch=True)
            return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("checked", float(batch_idx))

        module = classifier(L, training_step=training_step, validation_step=validation_step)
        batches = DataLoader(loader(10).dataset, batch_size=4, collate_fn=Graphs)
        fit = trainer(L, tmp_path, max_epochs=1)
        fit.fit(module, batches, batches)
        return {name: float(value) for name, value in fit.callback_metrics.items()}

    assert run(ours)["checked"] == pytest.approx(0.8), "four samples, four, and two"
    compare(run)


class Bank(torch.nn.Module):
    """A memory that is empty until it is filled, and takes the size of what it is given to load."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.empty(0))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.rows.resize_(state_dict[f"{prefix}rows"].shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


def forgets_old_names(module: Any, state_dict: Any, prefix: str, *args: Any) -> None:
    state_dict.pop(f"{prefix}old", None)


def without_a_teacher(self: Any, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
    kept = {name: value for name, value in state_dict.items() if not name.startswith("teacher")}
    return torch.nn.Module.load_state_dict(self, kept, strict, assign)


@pytest.mark.parametrize("stage", ["validate", "fit"])
@pytest.mark.parametrize("kind", ["a layer", "a hook", "the module"])
def test_layers_that_load_in_their_own_way(tmp_path: Path, kind: str, stage: str) -> None:
    def run(L: Any) -> dict[str, Any]:
        torch.manual_seed(3)
        own = {"load_state_dict": without_a_teacher} if kind == "the module" else {}
        module, fresh, other = classifier(L, **own), classifier(L, **own), classifier(L)
        if kind == "a layer":
            module.bank, fresh.bank, other.bank = Bank(), Bank(), torch.nn.Linear(2, 2)
            module.bank.rows = torch.arange(6.0).view(3, 2)
        elif kind == "a hook":
            module.bank, fresh.bank = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
            module.bank.register_buffer("old", torch.zeros(1))
            fresh.bank.register_load_state_dict_pre_hook(forgets_old_names)
        else:
            module.teacher = torch.nn.Linear(2, 2).requires_grad_(False)
        path = tmp_path / L.__name__ / "kept.ckpt"
        fit = trainer(L, tmp_path, max_epochs=1)
        fit.fit(module, loader())
        fit.save_checkpoint(path)
        with pytest.raises((RuntimeError, ValueError), match=r"does not fit|Error\(s\) in loading"):
            trainer(L, tmp_path).validate(other, loader(), ckpt_path=path, verbose=False)
        if stage == "fit":
            trainer(L, tmp_path, max_epochs=2).fit(fresh, loader(), ckpt_path=path)
        else:
            trainer(L, tmp_path).validate(fresh, loader(), ckpt_path=path, verbose=False)
        return weights(fresh)

    compare(run)


@pytest.mark.parametrize("loaders", [1, 2])
def test_hooks_of_an_evaluations_start_draw_what_they_draw_in_lightning(tmp_path: Path, loaders: int) -> None:
    """A memory bank chooses its rows when validation starts: the loader has drawn its seed by then."""

    def run(L: Any) -> dict[str, Any]:
        drawn: list[tuple[str, float]] = []

        def drawing(hook: str) -> Any:
            return lambda self, *args: drawn.append((hook, float(torch.rand(1))))

        stages = ("validation", "test", "predict")
        names = [f"on_{stage}_{moment}" for stage in stages for moment in ("start", "epoch_start", "epoch_end", "end")]
        step = {"test_step": lambda self, batch, batch_idx, dataloader_idx=0: None}
        module = classifier(L, **{name: drawing(name) for name in names}, **step)
        module_step = type(module).validation_step
        type(module).validation_step = lambda self, batch, batch_idx, dataloader_idx=0: module_step(self, batch, 0)
        torch.manual_seed(3)
        data = [DataLoader(loader(samples).dataset, batch_size=4, shuffle=samples == 9) for samples in (9, 6)[:loaders]]
        fit = trainer(L, tmp_path, max_epochs=2, num_sanity_val_steps=1)
        fit.fit(module, DataLoader(loader().dataset, batch_size=4, shuffle=True), data)
        for stage in ("validate", "test"):
            getattr(fit, stage)(module, data, verbose=False)
        found = fit.predict(module, data)
        return {"drawn": drawn, "weights": weights(module), "found": found, "after": torch.rand(1)}

    assert len(compare(run)["drawn"]) == 4 * (1 + 2 + 1 + 1 + 1)


def test_a_sum_of_metrics_is_seen_after_its_parts_began_anew(tmp_path: Path) -> None:
    """As the ELBO of scvi-tools: a composition of metrics, updated as one and logged beside its parts."""

    def run(L: Any) -> dict[str, Any]:
        seen: list[Any] = []
        model = classifier(L)
        model.near, model.far = MeanMetric(), MeanMetric()
        model.both = model.near + model.far

        def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
            self.both.update(batch[0].sum())
            self.log_dict({"both": self.both, "near": self.near, "far": self.far}, on_step=False, on_epoch=True)

        def look(self: Any) -> None:
            seen.append([float(self.trainer.callback_metrics[name]) for name in ("both", "near", "far")])

        for name, part in {"validation_step": validation_step, "on_validation_end": look}.items():
            setattr(type(model), name, part)
        fit = trainer(L, tmp_path / L.__name__, max_epochs=2)
        fit.fit(model, loader(), loader(8))
        return {"seen": seen, "after": [float(fit.callback_metrics["both"])]}

    assert len(compare(run)["seen"]) == 2


@pytest.mark.parametrize("shared", [True, False], ids=["one generator", "one each"])
@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
def test_loaders_at_once_with_generators_of_their_own(tmp_path: Path, mode: str, shared: bool) -> None:
    """As Donut has them, for all its data sets: a sampler draws from its generator also where it is found used up."""

    def run(L: Any) -> dict[str, Any]:
        seen: list[Any] = []
        one = torch.Generator().manual_seed(3)

        def made(samples: int, batch_size: int) -> Any:
            own = one if shared else torch.Generator().manual_seed(samples)
            data = loader(samples).dataset
            return DataLoader(data, batch_size=batch_size, shuffle=True, generator=own)

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            parts = [part for part in batch if part is not None]
            seen.extend(part[0].flatten().tolist() for part in parts)
            return sum(self(x).sum() for x, _ in parts)

        model = classifier(L)
        type(model).training_step = training_step
        loaders = L.utilities.CombinedLoader([made(6, 2), made(7, 1), made(4, 2)], mode)
        trainer(L, tmp_path / L.__name__, max_epochs=3).fit(model, loaders)
        return {f"{number}": part for number, part in enumerate(seen)}

    assert compare(run)


@pytest.mark.parametrize(
    "given",
    [
        {name: value}
        for value, names in (
            (True, ("check_val_every_n_epoch", "val_check_interval", "log_every_n_steps", "accumulate_grad_batches")),
            (True, ("limit_val_batches", "max_steps", "min_steps", "devices", "num_nodes", "gradient_clip_val")),
            (False, ("limit_train_batches", "overfit_batches", "max_epochs", "callbacks", "profiler")),
            (False, ("num_sanity_val_steps", "reload_dataloaders_every_n_epochs", "gradient_clip_val")),
        )
        for name in names
    ],
    ids=str,
)
def test_true_and_false_are_numbers(tmp_path: Path, given: dict[str, Any]) -> None:
    """Where a number is meant; and False is none, where objects are."""

    def run(L: Any) -> dict[str, Any]:
        module, asked = classifier(L), []
        module.train_dataloader = lambda: asked.append("train") or loader()
        module.val_dataloader = lambda: asked.append("val") or loader(9)
        fit = trainer(L, tmp_path, **{"max_epochs": 3, **given})
        fit.fit(module)
        return {
            "asked": asked,
            "losses": module.losses,
            "rates": module.rates,
            "counters": [fit.global_step, fit.current_epoch],
            "weights": weights(module),
        }

    compare(run)


def test_true_is_no_number_of_drivetrains_own() -> None:
    with pytest.raises(ConfigurationError, match="max_epochs=True"):
        drivetrain.Trainer(max_epochs=True)


class Halving:
    """A schedule that has no ``step``: the project calls what it has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.calls = optimizer, 0

    def halve(self) -> None:
        self.calls += 1
        self.optimizer.param_groups[0]["lr"] /= 2

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_schedule_that_the_project_steps_needs_no_step(by_hand: bool, tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        class Module(L.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = not by_hand
                self.layer = torch.nn.Linear(3, 2)

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
                return [optimizer], [Halving(optimizer)]

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
                if not by_hand:
                    return loss
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                return None

            def on_train_epoch_end(self) -> None:
                if by_hand:
                    self.lr_schedulers().halve()

            if not by_hand:

                def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
                    scheduler.halve()

        first = trainer(L, tmp_path, max_epochs=2)
        first.fit(Module(), loader())
        first.save_checkpoint(tmp_path / "a.ckpt")
        further = trainer(L, tmp_path, max_epochs=3)
        further.fit(Module(), loader(), ckpt_path=tmp_path / "a.ckpt")
        [config] = further.lr_scheduler_configs
        return {"calls": config.scheduler.calls, "rate": further.optimizers[0].param_groups[0]["lr"]}

    assert compare(run) == {"calls": 3, "rate": 0.0625}


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_optimizer_of_the_projects_own_is_given_its_closure_by_name(by_hand: bool, tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        given: list[Any] = []

        class Named(torch.optim.SGD):
            def step(self, *unnamed: Any, **options: Any) -> Any:
                given.append((len(unnamed), sorted(options)))
                return super().step(options["closure"])

        def step_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
            def closure() -> Any:
                self.zero_grad()
                loss = self.head(self.backbone(batch[0])).square().mean()
                self.manual_backward(loss)
                return loss

            self.optimizers().step(closure)
            self.optimizers().step(closure=closure, rate=2)

        parts: dict[str, Any] = {"training_step": step_by_hand} if by_hand else {}
        module = classifier(L, configure_optimizers=lambda self: Named(self.parameters(), lr=0.1), **parts)
        module.automatic_optimization = not by_hand
        trainer(L, tmp_path, max_epochs=1, limit_train_batches=2).fit(module, loader())
        return {"given": given, "weights": weights(module)}

    assert (0, ["closure"]) in compare(run)["given"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_checkpoint_of_a_module_that_was_not_trained(workers: int, tmp_path: Path) -> None:
    """What scripts do to turn weights from elsewhere into a checkpoint."""

    def run(L: Any) -> dict[str, Any]:
        class Module(L.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self, size: int = 3) -> None:
                super().__init__()
                self.save_hyperparameters()
                self.layer = torch.nn.Linear(size, 1)

            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                checkpoint["own"] = 1

        options: dict[str, Any] = {"devices": workers, "strategy": "ddp_spawn"} if workers > 1 else {}
        saving, module = trainer(L, tmp_path, **options), Module(4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            saving.strategy.connect(module)
            saving.save_checkpoint(tmp_path / "a.ckpt")
        held = torch.load(tmp_path / "a.ckpt", weights_only=True)
        loaded = Module.load_from_checkpoint(tmp_path / "a.ckpt")
        assert torch.equal(loaded.layer.weight, module.layer.weight)
        same = ("epoch", "global_step", "hyper_parameters", "own")
        return {"asked": saving.lightning_module is module, "size": loaded.hparams.size} | {k: held[k] for k in same}

    compare(run)


class Played(Told):
    """Rests within ``no_grad`` between two samples, and says whether it finds gradients off when it goes on."""

    def __iter__(self) -> Iterator[Any]:
        with torch.no_grad():
            for sample in super().__iter__():
                yield sample
                self.seen.append(torch.is_grad_enabled())


class PlayedOfUnknownLength(Played):
    __len__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("kind", [Played, PlayedOfUnknownLength])
def test_a_stream_that_rests_without_gradients(
    kind: type[Played], batch_size: int | None, accumulated: int, tmp_path: Path
) -> None:
    """Roll-outs of a policy, which the loop then trains."""

    def run(L: Any) -> dict[str, Any]:
        def step(self: Any, batch: Any, batch_idx: int) -> Any:
            assert torch.is_grad_enabled()
            return self.head(self.backbone(batch[0].reshape(-1, 3))).square().mean()

        torch.manual_seed(1)
        module = classifier(L, training_step=step)
        data = DataLoader(kind([], 12), batch_size=batch_size)
        trainer(L, tmp_path, max_epochs=2, accumulate_grad_batches=accumulated).fit(module, data)
        return {"weights": weights(module)}

    compare(run)


@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), ("ddp_spawn", 2)])
def test_gradients_are_off_for_the_stream_itself(strategy: str, devices: int, tmp_path: Path) -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        assert torch.is_grad_enabled() and True not in stream.dataset.seen
        return self.head(self.backbone(batch[0])).square().mean()

    stream = DataLoader(PlayedOfUnknownLength([], 12), batch_size=4)
    module = classifier(ours, training_step=step)
    trainer(ours, tmp_path, max_epochs=2, strategy=strategy, devices=devices).fit(module, stream)
    assert devices > 1 or [one for one in stream.dataset.seen if not isinstance(one, str)] == [False] * 24


SEEDS_ON_IMPORT = """
import torch
import drivetrain.lightning as L

L.seed_everything(42, verbose=False)
torch.set_float32_matmul_precision("medium")

class Notes(L.Callback):
    def __init__(self):
        self.labels, self.precision = [], ""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.labels.append(batch[0].tolist())
        self.precision = torch.get_float32_matmul_precision()
"""


def test_what_a_module_sets_as_it_is_imported_gives_way_to_what_the_script_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    before = torch.get_float32_matmul_precision()
    (tmp_path / "seeds_on_import.py").write_text(SEEDS_ON_IMPORT)
    monkeypatch.syspath_prepend(tmp_path)
    import seeds_on_import  # type: ignore[import-not-found]

    def read() -> Any:
        ours.seed_everything(7, verbose=False)
        torch.set_float32_matmul_precision("high")
        notes = seeds_on_import.Notes()
        fit = trainer(ours, tmp_path, strategy="ddp", devices=2, max_epochs=1, callbacks=[notes])
        fit.fit(classifier(ours), DataLoader(loader().dataset, batch_size=4, shuffle=True))
        return notes.labels, notes.precision

    try:
        copied = read()
        monkeypatch.setattr(start_method, "why_not_fork", lambda: "this process has touched the CUDA driver")
        assert read() == copied and copied[1] == "high"
    finally:
        torch.set_float32_matmul_precision(before)
        del sys.modules["seeds_on_import"]


@pytest.mark.parametrize("norm", [False, True])
def test_there_need_be_no_batchnorm_to_synchronise(norm: bool, tmp_path: Path) -> None:
    def trained(**options: Any) -> Any:
        torch.manual_seed(3)
        module = classifier(ours, norm)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer(ours, tmp_path, strategy="ddp", devices=2, max_epochs=1, **options).fit(module, loader())
        return weights(module)

    if norm:
        with pytest.raises(ConfigurationError, match="sync_batchnorm=True needs GPUs"):
            trained(sync_batchnorm=True)
        return
    found, plain = trained(sync_batchnorm=True), trained()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def flattened(samples: list[Any]) -> Any:
    """As many rows of each sample as its number says, so that batches have other sizes than they have samples."""
    return torch.tensor([number for (number,) in samples for _ in range(int(number) + 1)])


def test_what_a_rank_logs_weighs_by_the_rows_that_were_collated(tmp_path: Path) -> None:
    class Notes(ours.Callback):
        def __init__(self) -> None:
            self.found: dict[str, float] = {}

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.found = {name: float(value) for name, value in trainer.callback_metrics.items()}

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("own", batch.mean())
        self.log("all", batch.mean(), sync_dist=True)

    numbers = torch.arange(9.0)
    batches = DataLoader(TensorDataset(numbers), batch_size=2, collate_fn=flattened)
    notes = Notes()
    fit = trainer(ours, tmp_path, strategy="ddp", devices=2, callbacks=[notes])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit.validate(classifier(ours, validation_step=validation_step), batches, verbose=False)
    own = numbers[::2]  # of the first rank
    mean = {
        name: float((some * (some + 1)).sum() / (some + 1).sum()) for name, some in (("own", own), ("all", numbers))
    }
    assert notes.found == pytest.approx(mean)
