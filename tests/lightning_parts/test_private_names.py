"""Methods of Lightning's inside that projects call, or override, in what they derive from its parts."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as theirs
import pytest
import torch
from torch import nn
from tqdm import tqdm

import drivetrain.lightning as ours
from drivetrain.errors import ConfigurationError
from tests.facade.recorder import QUIET, loader, net
from tests.lightning_parts.doubles import put_mlflow, put_wandb

both = pytest.mark.parametrize("L", [theirs, ours], ids=["lightning", "drivetrain"])


def project(L: Any, **methods: Any) -> Any:
    """A module of either library, which logs a figure that falls, then rises."""

    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/x", torch.tensor([4.0, 2.0, 3.0, 5.0][self.current_epoch]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for name, method in methods.items():
        setattr(Module, name, method)
    return Module()


def fit(L: Any, callback: Any, module: Any = None, **options: Any) -> Any:
    settings = {**QUIET, "logger": False, "max_epochs": 4, "enable_checkpointing": None, **options}
    trainer = L.Trainer(**settings, callbacks=callback)
    trainer.fit(module or project(L), loader(), loader())
    return trainer


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("callbacks.ModelCheckpoint", "_format_checkpoint_name"),
        ("callbacks.ModelCheckpoint", "_get_metric_interpolated_filepath_name"),
        ("callbacks.ModelCheckpoint", "_save_monitor_checkpoint"),
        ("callbacks.ModelCheckpoint", "_should_remove_checkpoint"),
        ("callbacks.ModelCheckpoint", "_remove_checkpoint"),
        ("callbacks.ModelCheckpoint", "_link_checkpoint"),
        ("callbacks.ModelCheckpoint", "_find_last_checkpoints"),
        ("callbacks.EarlyStopping", "_validate_condition_metric"),
        ("callbacks.EarlyStopping", "_should_skip_check"),
        ("callbacks.EarlyStopping", "_improvement_message"),
        ("callbacks.EarlyStopping", "_log_info"),
        ("callbacks.Timer", "_check_time_remaining"),
        ("callbacks.LearningRateMonitor", "_extract_stats"),
        ("callbacks.LearningRateMonitor", "_find_names_from_schedulers"),
        ("callbacks.LearningRateMonitor", "_find_names_from_optimizers"),
        ("callbacks.LearningRateMonitor", "_check_duplicates_and_update_name"),
        ("callbacks.LearningRateMonitor", "_add_prefix"),
        ("callbacks.LearningRateMonitor", "_add_suffix"),
        ("callbacks.LearningRateMonitor", "_get_optimizer_stats"),
        ("callbacks.LearningRateMonitor", "_extract_lr"),
        ("callbacks.LearningRateMonitor", "_extract_momentum"),
        ("callbacks.LearningRateMonitor", "_extract_weight_decay"),
        ("callbacks.LearningRateMonitor", "_remap_keys"),
        ("callbacks.RichProgressBar", "_init_progress"),
        ("callbacks.RichProgressBar", "_add_task"),
        ("callbacks.RichProgressBar", "_update"),
        ("callbacks.RichProgressBar", "_update_metrics"),
        ("callbacks.RichProgressBar", "_get_train_description"),
        ("callbacks.RichProgressBar", "_initialize_train_progress_bar_id"),
        ("callbacks.RichProgressBar", "_reset_progress_bar_ids"),
        ("callbacks.RichProgressBar", "_stop_progress"),
        ("callbacks.RichProgressBar", "refresh"),
        ("callbacks.TQDMProgressBar", "_should_update"),
        ("callbacks.TQDMProgressBar", "_resolve_refresh_rate"),
        ("callbacks.DeviceStatsMonitor", "_get_and_log_device_stats"),
        ("callbacks.WeightAveraging", "_swap_models"),
        ("callbacks.WeightAveraging", "_copy_average_to_current"),
        ("loggers.WandbLogger", "_scan_and_log_checkpoints"),
        ("loggers.MLFlowLogger", "_scan_and_log_checkpoints"),
        ("LightningModule", "_on_before_batch_transfer"),
        ("LightningModule", "_apply_batch_transfer_handler"),
        ("LightningModule", "_set_hparams"),
        ("LightningDataModule", "_set_hparams"),
        ("LightningModule", "_to_hparams_dict"),
    ],
)
def test_the_arguments_are_lightnings(kind: str, name: str) -> None:
    def method(L: Any) -> Any:
        owner = L
        for part in kind.split("."):
            owner = getattr(owner, part)
        return owner.__dict__.get(name) or inspect.getattr_static(owner, name)

    there, here = method(theirs), method(ours)
    assert isinstance(there, staticmethod) is isinstance(here, staticmethod)
    expected, found = (inspect.signature(getattr(each, "__func__", each)).parameters for each in (there, here))
    assert [(p.name, p.default) for p in found.values()] == [(p.name, p.default) for p in expected.values()]


def test_the_name_of_a_checkpoint() -> None:
    def names(L: Any) -> list[Any]:
        made = L.callbacks.ModelCheckpoint(dirpath="/x", filename="{epoch}-{val/x:.2f}")
        metrics = {"epoch": torch.tensor(2), "step": torch.tensor(7), "val/x": torch.tensor(0.129)}
        return [
            made._format_checkpoint_name(None, dict(metrics)),
            made._format_checkpoint_name("{val/x:.1f}_{absent}", dict(metrics)),
            made._format_checkpoint_name("{epoch:03d}", dict(metrics), "p", auto_insert_metric_name=False),
            made._format_checkpoint_name("{epoch}", dict(metrics), prefix=""),
            made.format_checkpoint_name(dict(metrics), ver=3, prefix="p"),
        ]

    assert names(ours) == names(theirs)


def test_parts_of_a_checkpoint_callback_are_asked(tmp_path: Path) -> None:
    def run(L: Any, folder: Path) -> tuple[list[Any], list[str]]:
        calls: list[Any] = []

        class Own(L.callbacks.ModelCheckpoint):  # type: ignore[misc, name-defined]
            def _format_checkpoint_name(self, filename: Any, metrics: Any, **options: Any) -> str:
                return super()._format_checkpoint_name(filename, metrics, **options).replace("/", "_")

            def _get_metric_interpolated_filepath_name(
                self, candidates: Any, trainer: Any, replaced: Any = None
            ) -> str:
                calls.append(("name", replaced and os.path.basename(replaced)))
                return super()._get_metric_interpolated_filepath_name(candidates, trainer, replaced)

            def _save_monitor_checkpoint(self, trainer: Any, candidates: Any) -> None:
                calls.append(("monitor", float(candidates["val/x"])))
                super()._save_monitor_checkpoint(trainer, candidates)

            def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
                found = super()._should_remove_checkpoint(trainer, previous, current)
                calls.append(("remove", os.path.basename(previous), os.path.basename(current), found))
                return found and "epoch=0" not in previous

            @staticmethod
            def _link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
                calls.append(("link", os.path.basename(filepath), os.path.basename(linkpath)))
                super(Own, Own)._link_checkpoint(trainer, filepath, linkpath)
                super(Own, Own)._link_checkpoint(trainer, filepath, str(folder / "newest.ckpt"))

            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                super().on_train_end(trainer, pl_module)
                calls.append(sorted(os.path.basename(each) for each in self._find_last_checkpoints(trainer)))

        kept = Own(folder, "{epoch}-{val/x:.0f}", "val/x", save_last="link", save_top_k=1)
        fit(L, kept)
        assert os.path.samefile(folder / "newest.ckpt", folder / "last.ckpt")
        return calls, sorted(os.listdir(folder))

    there, here = run(theirs, tmp_path / "there"), run(ours, tmp_path / "here")
    assert here == there
    assert here[1] == ["epoch=0-val_x=4.ckpt", "epoch=1-val_x=2.ckpt", "last.ckpt", "newest.ckpt"]


def test_parts_of_early_stopping_are_asked() -> None:
    def run(L: Any) -> tuple[list[Any], int, float]:
        calls: list[Any] = []

        class Own(L.callbacks.EarlyStopping):  # type: ignore[misc, name-defined]
            def _should_skip_check(self, trainer: Any) -> bool:
                return super()._should_skip_check(trainer) or trainer.current_epoch == 1

            def _validate_condition_metric(self, logs: Any) -> bool:
                calls.append(sorted(logs))
                return super()._validate_condition_metric(logs)

            def _improvement_message(self, current: torch.Tensor) -> str:
                return f"better: {float(current)} than {float(self.best_score)}"

            @staticmethod
            def _log_info(trainer: Any, message: str, log_rank_zero_only: bool) -> None:
                calls.append((message if message.startswith("better") else "else", log_rank_zero_only))

        stopping = Own("val/x", patience=2, verbose=True)
        trainer = fit(L, stopping, enable_checkpointing=False, num_sanity_val_steps=1)
        return calls, trainer.current_epoch, float(stopping.best_score)

    assert run(ours) == run(theirs)


@both
def test_early_stopping_at_a_moment_of_its_own(L: Any) -> None:
    """As projects write it: the hooks are replaced, and ask what the class keeps."""
    asked: list[Any] = []

    class Own(L.callbacks.EarlyStopping):  # type: ignore[misc, name-defined]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            asked.append(bool(self._check_on_train_epoch_end))
            if not self._check_on_train_epoch_end or self._should_skip_check(trainer):
                return
            if self._validate_condition_metric(trainer.callback_metrics):
                self._log_info(trainer, self._improvement_message(torch.tensor(1.0)), True)
                trainer.should_stop = trainer.current_epoch == 1

    trainer = fit(L, Own("val/x"), enable_checkpointing=False)
    assert trainer.current_epoch == 2 and asked == [True, True]
    with pytest.raises(RuntimeError, match="absent"):
        L.callbacks.EarlyStopping("absent")._validate_condition_metric({"loss": torch.tensor(1.0)})
    assert not L.callbacks.EarlyStopping("absent", strict=False)._validate_condition_metric({})


@both
def test_a_timer_that_looks_at_its_own_moments(L: Any) -> None:
    seen: list[int] = []

    class Own(L.callbacks.Timer):  # type: ignore[misc, name-defined]
        def _check_time_remaining(self, trainer: Any) -> None:
            super()._check_time_remaining(trainer)
            seen.append(trainer.global_step)
            if trainer.global_step == 3:
                trainer.should_stop = True

    trainer = fit(L, Own("10:00:00:00"), enable_checkpointing=False, min_steps=None, limit_train_batches=4)
    assert trainer.global_step == 3 and seen[:4] == [0, 1, 2, 3]


def test_an_average_that_is_tested_with() -> None:
    def run(L: Any) -> tuple[list[str], list[torch.Tensor]]:
        calls: list[str] = []

        class Own(L.callbacks.WeightAveraging):  # type: ignore[misc, name-defined]
            def _swap_models(self, pl_module: Any) -> None:
                calls.append("swap")
                super()._swap_models(pl_module)

            def _copy_average_to_current(self, pl_module: Any) -> None:
                calls.append("copy")
                super()._copy_average_to_current(pl_module)

            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                super().on_train_epoch_end(trainer, pl_module)
                if trainer.current_epoch == 1:
                    self._copy_average_to_current(pl_module)

        module = project(L)
        fit(L, Own(), module, enable_checkpointing=False)
        return calls, [value.detach() for value in module.parameters()]

    (there, expected), (here, found) = run(theirs), run(ours)
    assert here == there and here.count("copy") == 2
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["WandbLogger", "MLFlowLogger"])
def test_a_logger_that_uploads_in_its_own_way(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_wandb(monkeypatch)
    put_mlflow(monkeypatch)
    seen: list[Any] = []

    class Own(getattr(ours.loggers, kind)):  # type: ignore[misc]
        def _scan_and_log_checkpoints(self, checkpoint_callback: Any) -> None:
            path = checkpoint_callback.best_model_path
            seen.append((os.path.basename(path), path in self._logged_model_time))
            self._logged_model_time[path] = os.path.getmtime(path)

    options: dict[str, Any] = {"save_dir": str(tmp_path), "log_model": "all"}
    kept = ours.callbacks.ModelCheckpoint(tmp_path / "kept", "{epoch}", save_top_k=-1)
    fit(ours, kept, logger=Own(**options), max_epochs=2)
    assert seen == [("epoch=0.ckpt", False), ("epoch=1.ckpt", False)]


@both
def test_hyper_parameters_that_a_class_chooses(L: Any) -> None:
    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int = 3, note: str = "n") -> None:
            super().__init__()
            self.save_hyperparameters()
            self._set_hparams(argparse.Namespace(depth=2))
            self._set_hparams({"rate": 0.5})

        def _set_hparams(self, hp: Any) -> None:
            found = self._to_hparams_dict(hp)
            super()._set_hparams({name: value for name, value in found.items() if name != "note"})

    assert dict(Module().hparams) == {"width": 3, "depth": 2, "rate": 0.5} and Module().hparams.depth == 2
    with pytest.raises(ValueError, match=r"Primitives|not str"):
        Module()._to_hparams_dict("text")


@both
def test_batches_of_its_own_on_their_way_to_the_device(L: Any) -> None:
    calls: list[Any] = []

    class Data(L.LightningDataModule):  # type: ignore[misc, name-defined]
        def train_dataloader(self) -> Any:
            return loader(22, 4)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append(("after", dataloader_idx))
            return batch

    def before(self: Any, batch: Any, dataloader_idx: int) -> Any:
        calls.append(("before", dataloader_idx))
        return batch

    def handler(self: Any, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        batch = L.LightningModule._apply_batch_transfer_handler(self, batch, device, dataloader_idx)
        calls.append("handler")
        return [batch[0] * 2, batch[1]]

    module = project(L, on_before_batch_transfer=before, _apply_batch_transfer_handler=handler)
    seen: list[float] = []
    step = type(module).training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.append(float(batch[0].abs().sum()))
        return step(self, batch, batch_idx)

    type(module).training_step = training_step
    [first, *_] = loader(22, 4)
    doubled = module._apply_batch_transfer_handler(module._on_before_batch_transfer(first, dataloader_idx=1))
    assert torch.equal(doubled[0], first[0] * 2) and calls == [("before", 1), "handler"]
    calls.clear()
    trainer = L.Trainer(**{**QUIET, "logger": False, "max_epochs": 1, "limit_train_batches": 1})
    trainer.fit(module, datamodule=Data())
    assert calls == [("before", 0), ("after", 0), "handler"] and seen == [float((first[0] * 2).abs().sum())]


class Rows(list[Any]):
    """What loggers of either library are given."""

    def of(self, L: Any) -> Any:
        rows = self

        class Own(L.loggers.logger.Logger):  # type: ignore[misc, name-defined]
            name, version, save_dir = "n", 0, None

            def log_metrics(self, metrics: Any, step: Any = None) -> None:
                rows.append((dict(metrics), step))

            def log_hyperparams(self, *args: Any, **more: Any) -> None: ...

        return Own()


@pytest.mark.parametrize("interval", [None, "step", "epoch"])
def test_a_monitor_of_learning_rates_that_logs_more(interval: str | None) -> None:
    def run(L: Any) -> list[Any]:
        rows = Rows()

        class Own(L.callbacks.LearningRateMonitor):  # type: ignore[misc, name-defined]
            def _extract_stats(self, trainer: Any, interval: str) -> dict[str, float]:
                found = {name: round(value, 6) for name, value in super()._extract_stats(trainer, interval).items()}
                return {**found, "epoch": trainer.current_epoch, "asked": float(len(interval))}

        fit(L, Own(interval), logger=rows.of(L), log_every_n_steps=2, max_epochs=2, enable_checkpointing=False)
        return [row for row in rows if "asked" in row[0]]

    here = run(ours)
    assert here == run(theirs) and here


def _several_optimizers(self: Any) -> Any:
    """Two of one class with schedules, the first of two groups; one of another class without, of groups with names."""
    self.automatic_optimization = False
    weights, biases = [[p for p in self.net.parameters() if (p.ndim > 1) is whole] for whole in (True, False)]
    first = torch.optim.SGD([{"params": weights}, {"params": biases, "lr": 0.2}], lr=0.1, momentum=0.9)
    second = torch.optim.SGD(weights, lr=0.3)
    third = torch.optim.Adam([{"params": weights, "name": "w"}, {"params": biases, "name": "b"}], lr=0.4)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1) for each in (first, second)]
    return [first, second, third], [schedules[0], {"scheduler": schedules[1], "interval": "step"}]


def _steps(self: Any, batch: Any, batch_idx: int) -> None:
    for optimizer in self.optimizers():
        optimizer.step()


MONITORED: dict[str, Any] = {
    "_find_names_from_schedulers": lambda found: ([[f"own/{name}" for name in each] for each in found[0]], *found[1:]),
    "_find_names_from_optimizers": lambda found: ([[f"own/{name}" for name in each] for each in found[0]], found[1]),
    "_check_duplicates_and_update_name": lambda found: [name.upper() for name in found],
    "_add_prefix": lambda found: f"{found}-own",
    "_add_suffix": lambda found: f"{found}-own",
    "_duplicate_param_group_names": lambda found: found,
    "_get_optimizer_stats": lambda found: {**found, "asked": 1.0},
    "_extract_lr": lambda found: {**found, **{f"{name}-own": 2 * value for name, value in found.items()}},
    "_extract_momentum": lambda found: {name: value + 1.0 for name, value in found.items()},
    "_extract_weight_decay": lambda found: {name: value + 1.0 for name, value in found.items()},
    "_remap_keys": lambda found: found,
}


@pytest.mark.parametrize("interval", [None, "step", "epoch"])
@pytest.mark.parametrize("name", MONITORED)
def test_the_names_and_figures_of_a_monitor_of_learning_rates(name: str, interval: str | None) -> None:
    def run(L: Any) -> list[Any]:
        rows = Rows()
        calls: list[str] = []

        def own(self: Any, *arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return MONITORED[name](getattr(super(Own, self), name)(*arguments, **named))

        Own = type("Own", (L.callbacks.LearningRateMonitor,), {name: own})
        monitor = Own(interval, log_momentum=True, log_weight_decay=True)
        module = project(L, configure_optimizers=_several_optimizers, training_step=_steps)
        settings = {"log_every_n_steps": 2, "max_epochs": 2, "enable_checkpointing": False}
        fit(L, monitor, module, logger=rows.of(L), **settings)
        kept = [{key: value for key, value in each.items() if value} for each in (monitor.lrs,)]
        return [calls, kept, [row for row in rows if "val/x" not in row[0]]]

    here, there = run(ours), run(theirs)
    assert here == there
    assert here[0] and len(here[2]) > 1


def test_when_a_bar_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(L: Any) -> Any:
        asked: list[Any] = []

        class Own(L.callbacks.TQDMProgressBar):  # type: ignore[misc, name-defined]
            @staticmethod
            def _resolve_refresh_rate(refresh_rate: int) -> int:
                return 2 * refresh_rate

            def _should_update(self, current: int, total: int) -> bool:
                asked.append((current, total, super()._should_update(current, total)))
                return current == 1

        bar = Own(1)
        fit(L, bar, max_epochs=2, enable_checkpointing=False, enable_progress_bar=True)
        return asked, bar.refresh_rate, bar.train_progress_bar.n

    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread of Lightning's bar is left
    with contextlib.redirect_stdout(io.StringIO()):
        here, there = run(ours), run(theirs)
    assert here == there and here[0]


@both
def test_parts_of_a_bar_of_rich(L: Any) -> None:
    """A bar that adds one of its own, and has its own words and metrics."""
    calls: set[str] = set()
    screen = io.StringIO()

    class Own(L.callbacks.RichProgressBar):  # type: ignore[misc, name-defined]
        mine: Any = None

        def _init_progress(self, trainer: Any) -> None:
            super()._init_progress(trainer)
            if self.mine is None:
                self.mine = self._add_task(7, "whole run")
                calls.add(f"progress {self.train_progress_bar_id} {self.val_progress_bar_id}")

        def _add_task(self, total_batches: Any, description: str, visible: bool = True) -> Any:
            calls.add("add")
            return super()._add_task(total_batches, f"<{description.strip()}>", True)

        def _update(self, progress_bar_id: Any, current: int, visible: bool = True, hard: bool = False) -> None:
            if progress_bar_id == self.train_progress_bar_id:
                self._update(self.mine, current)
            elif progress_bar_id == self.val_progress_bar_id:
                calls.add("validation")
            super()._update(progress_bar_id, current, visible, hard)

        def _update_metrics(self, trainer: Any, pl_module: Any) -> None:
            calls.add("metrics")
            if self.train_progress_bar_id is not None:
                calls.add(f"of {self.train_progress_bar.total}")
            super()._update_metrics(trainer, pl_module)

        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            return {**super().get_metrics(trainer, pl_module), "mine": trainer.global_step}

        def _get_train_description(self, current_epoch: int) -> str:
            return f"own {current_epoch}"

        def _stop_progress(self) -> None:
            calls.add("stop")
            super()._stop_progress()

    kwargs = {"file": screen, "force_terminal": True, "width": 160, "color_system": None}
    bar = Own(1, console_kwargs=kwargs)
    if L is ours:
        bar._interval = 0.0  # seconds between two draws at least
    fit(L, bar, max_epochs=2, enable_checkpointing=False, enable_progress_bar=True)
    assert calls == {"progress None None", "add", "validation", "metrics", f"of {loader_length()}", "stop"}
    with pytest.raises(TypeError, match="has no bar of val now"):
        _ = ours.callbacks.RichProgressBar().val_progress_bar
    shown = screen.getvalue()
    for part in ("<whole run>", "<own 0>", "own 1", "mine", f"{loader_length()}/7"):
        assert part in shown, part


def loader_length() -> int:
    return len(loader())


def test_a_monitor_of_devices_that_reads_other_figures() -> None:
    def run(L: Any) -> tuple[list[Any], list[Any]]:
        rows, asked = Rows(), []

        class Own(L.callbacks.DeviceStatsMonitor):  # type: ignore[misc, name-defined]
            def _get_and_log_device_stats(self, trainer: Any, key: str) -> None:
                asked.append((key, trainer.global_step))
                super()._get_and_log_device_stats(trainer, key)
                for logger in trainer.loggers:
                    logger.log_metrics({"own": 1.0}, step=trainer.global_step)

        fit(L, Own(), logger=rows.of(L), log_every_n_steps=2, max_epochs=2, enable_checkpointing=False)
        return asked, [(sorted(row), step) for row, step in rows if "val/x" not in row]

    (there, expected), (here, found) = run(theirs), run(ours)
    assert here == there and found == expected and any(len(names) > 1 for names, _ in found)


def test_the_checkpoints_that_a_logger_has_not_sent(tmp_path: Path) -> None:
    def run(L: Any, folder: Path) -> list[Any]:
        found: list[Any] = []
        scan = importlib.import_module(f"{L.__name__}.loggers.utilities")._scan_checkpoints
        kept = L.callbacks.ModelCheckpoint(folder, "{epoch}", "val/x", save_last=True, save_top_k=2)
        fit(L, kept)
        for number, file in enumerate(sorted(folder.iterdir())):
            os.utime(file, (1000 + number, 1000 + number))
        sent: dict[str, float] = {}
        for _ in range(2):
            fresh = scan(kept, sent)
            found.append([(t, os.path.basename(path), score and float(score), tag) for t, path, score, tag in fresh])
            sent = {path: t - (tag == "latest") for t, path, _, tag in fresh}
        return found

    here = run(ours, tmp_path / "here")
    assert here == run(theirs, tmp_path / "there") and [len(each) for each in here] == [3, 1]


def test_callbacks_that_log_by_themselves_ask_whether_it_is_time() -> None:
    def run(L: Any) -> list[Any]:
        asked, rows = [], Rows()

        def ask(hook: str) -> Any:
            def method(self: Any, trainer: Any, *args: Any) -> None:
                asked.append((hook, trainer.global_step, trainer._logger_connector.should_update_logs))
                if hook == "on_train_batch_end" and trainer.global_step == 3:
                    trainer._logger_connector.log_metrics({"a": torch.tensor(1.5)}, step=9)
                    trainer._logger_connector.log_metrics({"b": 2, "step": torch.tensor(8)})
                    trainer._logger_connector.log_metrics({"c": 3.0})
                    asked.append({name: float(trainer.logged_metrics[name]) for name in "abc"})

            return method

        hooks = [f"on_{stage}_batch_{at}" for stage in ("train", "validation", "test") for at in ("start", "end")]
        hooks += ["on_fit_start", "on_train_epoch_start", "on_train_epoch_end"]
        own = type("Own", (L.Callback,), {hook: ask(hook) for hook in hooks})()
        options = {**QUIET, "max_epochs": 2, "enable_checkpointing": False, "num_sanity_val_steps": 1}
        trainer = L.Trainer(**options, logger=rows.of(L), callbacks=own, log_every_n_steps=3)
        asked.append(trainer._logger_connector.should_update_logs)
        validation_step, test_step = (lambda self, batch, batch_idx, dataloader_idx: None for _ in range(2))
        module = project(L, validation_step=validation_step, test_step=test_step)
        trainer.fit(module, loader(), [loader(), loader(22, 4)])
        trainer.test(module, [loader(22, 4), loader()], verbose=False)
        return [*asked, *(row for row in rows if {"a", "b", "c"} & row[0].keys())]

    here, there = run(ours), run(theirs)
    assert here == there
    assert {each[2] for each in here if isinstance(each, tuple) and len(each) == 3} == {True, False}
    assert sum(isinstance(each, tuple) and isinstance(each[0], dict) for each in here) == 3


@pytest.mark.parametrize("every", [1, 2])
def test_the_steps_that_rows_of_a_callback_stand_beside(every: int) -> None:
    def run(L: Any) -> list[Any]:
        found: list[Any] = []

        def note(hook: str) -> Any:
            def method(self: Any, trainer: Any, *args: Any) -> None:
                found.append((hook, trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped))

            return method

        hooks = [f"on_{part}_{at}" for part in ("train_batch", "train_epoch", "validation") for at in ("start", "end")]
        hooks += ["on_before_optimizer_step", "on_before_zero_grad", "on_train_end"]
        own = type("Own", (L.Callback,), {hook: note(hook) for hook in hooks})()
        fit(L, own, max_epochs=2, accumulate_grad_batches=every, enable_checkpointing=False)
        return found

    assert run(ours) == run(theirs)


def test_a_name_of_the_inside_is_refused_where_it_is_used() -> None:
    """Projects import such names for annotations, or do not use them at all."""
    from drivetrain.lightning.loops.fit_loop import _select_data_fetcher
    from drivetrain.lightning.tuner.lr_finder import _lr_find

    def annotated(found: _lr_find | None) -> None: ...

    assert not isinstance(ours.Trainer(**QUIET), _lr_find) and annotated(None) is None
    with pytest.raises(ConfigurationError, match=r"tuner\._lr_find is a part of Lightning's inside"):
        _lr_find(None)
    with pytest.raises(ConfigurationError, match="_select_data_fetcher is a part of Lightning's inside"):

        class Own(_select_data_fetcher):  # type: ignore[misc, valid-type]
            pass

    for module in (ours.tuner, ours.callbacks):
        assert not hasattr(module, "_repr_html_") and not hasattr(module, "__wrapped__")
    with pytest.raises(ImportError):
        from drivetrain.lightning.callbacks import Unknown  # type: ignore[attr-defined]  # noqa: F401
