"""One run of a project under one library, and everything about it that another library's run should equal."""

from __future__ import annotations

import csv
import functools
import inspect
import logging
import os
import random
import re
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import tqdm
import yaml

STAGES = ("fit", "validate", "test", "predict")
_CALLBACK_HOOKS = [
    "setup",
    "teardown",
    "on_fit_start",
    "on_fit_end",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_save_checkpoint",
    "on_load_checkpoint",
    "on_exception",
] + [f"on_{s}_{m}" for s in STAGES[1:] for m in ("start", "end", "epoch_start", "epoch_end")]
_CALLBACK_HOOKS += [f"on_{s}_batch_{m}" for s in STAGES[1:] for m in ("start", "end")]
_CALLBACK_HOOKS = [hook.replace("on_validate", "on_validation") for hook in _CALLBACK_HOOKS]
_MODULE_HOOKS = {
    *_CALLBACK_HOOKS,
    *[
        "training_step",
        "validation_step",
        "test_step",
        "predict_step",
        "configure_optimizers",
        "configure_model",
        "optimizer_step",
    ],
    *[
        "optimizer_zero_grad",
        "lr_scheduler_step",
        "configure_gradient_clipping",
        "backward",
        "transfer_batch_to_device",
    ],
    *["on_before_batch_transfer", "on_after_batch_transfer", "train_dataloader", "val_dataloader", "test_dataloader"],
    *["predict_dataloader", "prepare_data", "state_dict", "load_state_dict", "on_validation_model_eval"],
    *["on_validation_model_train", "on_validation_model_zero_grad", "on_test_model_eval", "on_test_model_train"],
} - {"state_dict", "load_state_dict"}
_COUNTERS = ("global_step", "current_epoch", "max_epochs", "max_steps", "should_stop", "num_training_batches")
_COUNTERS += ("num_val_batches", "num_test_batches", "num_predict_batches", "num_sanity_val_batches")
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


class Laboratory:
    """Makes a project's Trainers, watches them, and gathers facts by name.

    Attributes:
        facts: what was seen, flat: ``"0.1.fit.callback_metrics.val_loss"`` is what the first Trainer's second call,
            a ``fit``, left under that name.
    """

    def __init__(self, library: Any, folder: Path, **defaults: Any) -> None:
        self.library, self.folder, self.defaults = library, folder, defaults
        self.facts: dict[str, Any] = {}
        self.trainers: list[Any] = []

    def trainer(self, **options: Any) -> Any:
        """The library's Trainer: on the CPU, in the run's folder, quiet, and watched by a callback that records."""
        index, calls = len(self.trainers), iter(range(99))
        record = Record()
        options = {"accelerator": "cpu", "devices": 1, "default_root_dir": str(self.folder), **self.defaults, **options}
        for name in ("enable_progress_bar", "enable_model_summary"):
            options.setdefault(name, False)
        if options.get("logger") is None:
            options["logger"] = self.library.loggers.CSVLogger(str(self.folder))
        given = options.pop("callbacks", None) or []
        given = given if isinstance(given, list) else [given]
        trainer = self.library.Trainer(callbacks=[*given, recorder(self.library, record)], **options)
        self.trainers.append(trainer)
        for stage in STAGES:
            setattr(trainer, stage, self._watched(trainer, stage, f"{index}", calls, record))
        return trainer

    def note(self, name: str, value: Any) -> None:
        """A fact of the project's own."""
        if f"note.{name}" in self.facts:
            raise KeyError(f"{name} was noted before")
        self.facts[f"note.{name}"] = value

    def _watched(self, trainer: Any, stage: str, index: str, calls: Iterator[int], record: Record) -> Any:
        run = getattr(trainer, stage)

        @functools.wraps(run)
        def watched(*args: Any, **kwargs: Any) -> Any:
            for part in [*args, *kwargs.values()]:
                record.instrument(part)
            head = f"{index}.{next(calls)}.{stage}"
            result = run(*args, **kwargs)
            self._look(trainer, head, record)
            if result is not None:
                self.facts[f"{head}.result"] = result
            return result

        return watched

    def _look(self, trainer: Any, head: str, record: Record) -> None:
        self.facts[f"{head}.hooks"] = list(record.hooks)
        for name, *counted in record.counted:
            self.facts.setdefault(f"{head}.counted.{name}", []).append(counted)
        self.facts[f"{head}.losses"] = list(record.losses)
        self.facts[f"{head}.rates"] = list(record.rates)
        record.clear()
        for name in _COUNTERS if trainer.optimizers else _COUNTERS[:2]:  # before any fit the rest has no meaning
            self.facts[f"{head}.{name}"] = getattr(trainer, name)
        for kind in _METRICS:
            for name, value in getattr(trainer, kind).items():
                self.facts[f"{head}.{kind}.{name}"] = float(value)
        for name, value in trainer.lightning_module.state_dict().items():
            self.facts[f"{head}.weights.{name}"] = value.detach().clone() if torch.is_tensor(value) else value

    def look_at_files(self) -> None:
        """Facts about what lies in the run's folder: names, and what checkpoints and tables hold."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_dir():
                continue
            name = re.sub(r"(tfevents)\..*", r"\1", path.relative_to(self.folder).as_posix())  # a time and a process
            self.facts[f"file.{name}"] = True
            if path.suffix == ".ckpt":
                self._look_at_checkpoint(path, name)
            elif path.suffix == ".yaml":
                self.facts[f"parameters.{name}"] = yaml.safe_load(path.read_text())
            elif path.name == "metrics.csv":
                self.facts[f"table.{name}"] = _table(path)

    def _look_at_checkpoint(self, path: Path, name: str) -> None:
        held = torch.load(path, map_location="cpu", weights_only=False)
        head = f"checkpoint.{name}"
        for key in ("epoch", "global_step", "hyper_parameters", "hparams_name", "datamodule_hyper_parameters"):
            value = held.get(key)
            self.facts[f"{head}.{key}"] = dict(value) if isinstance(value, Mapping) else value
        self.facts[f"{head}.state_dict"] = dict(held["state_dict"])
        self.facts[f"{head}.optimizer_states"] = held.get("optimizer_states")
        self.facts[f"{head}.lr_schedulers"] = held.get("lr_schedulers")
        self.facts[f"{head}.keys"] = sorted({*held} - {"drivetrain"})  # what an exact resume needs besides


class Record:
    """What the hooks of a Trainer's runs saw, in order."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.hooks: list[str] = []
        self.counted: list[Any] = []
        self.losses: list[float] = []
        self.rates: list[list[float]] = []

    def instrument(self, part: Any) -> None:
        """Let the hooks that a project's own module or data module defines add their names."""
        for kind in type(part).__mro__:
            if kind.__module__.startswith("tests.lightning_parity"):
                for name, value in list(vars(kind).items()):
                    if name in _MODULE_HOOKS and isinstance(value, types.FunctionType) and not _is_watched(value):
                        setattr(kind, name, self._named(value, f"{kind.__name__}.{name}"))

    def _named(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            record = named.record  # type: ignore[attr-defined]
            record.hooks.append(name)
            return function(*args, **kwargs)

        named.record = self  # type: ignore[attr-defined]
        return named


def _is_watched(function: Any) -> bool:
    return hasattr(function, "record")


def recorder(library: Any, record: Record) -> Any:
    """A callback of ``library`` that overrides every hook and writes to ``record``."""

    def hook(name: str) -> Callable[..., Any]:
        original = getattr(library.Callback, name)
        names = list(inspect.signature(original).parameters)[1:]

        def called(self: Any, *args: Any, **kwargs: Any) -> None:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            trainer = given["trainer"]
            record.hooks.append(f"callback.{name}")
            record.counted.append(
                (name, trainer.global_step, trainer.current_epoch, given.get("batch_idx"), given.get("stage"))
            )
            if name == "on_train_batch_end":
                outputs = given["outputs"]
                loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
                record.losses.append(float("nan") if loss is None else float(loss))
                record.rates.append(
                    [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
                )

        return called

    body = {name: hook(name) for name in _CALLBACK_HOOKS}
    return type("Recorder", (library.Callback,), body)()


def _table(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics table, without empty cells and without order of columns."""
    with path.open(newline="") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


@contextmanager
def _untouched() -> Iterator[None]:
    """Environment, warnings and log levels are afterwards as they were; random generators start alike."""
    environment = dict(os.environ)
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "drivetrain")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    tqdm.tqdm.monitor_interval = 0  # it would leave a thread behind
    random.seed(11)
    numpy.random.seed(11)
    torch.manual_seed(11)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)


def run(
    project: Callable[[Any], Callable[[Laboratory], None]],
    library: Any,
    folder: Path,
    settled: Callable[[], Any] = lambda: None,
    **defaults: Any,
) -> dict[str, Any]:
    """Run what ``project(library)`` returns and give its facts.

    Args:
        settled: called when the run is over, before its files are looked at.
        defaults: options of every Trainer that the project does not give itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    laboratory = Laboratory(library, folder, **defaults)
    with _untouched():
        project(library)(laboratory)
        settled()
        laboratory.look_at_files()
        for trainer in laboratory.trainers:
            if hasattr(trainer, "close"):  # drivetrain's leaves the job of several ranks
                trainer.close()
    return laboratory.facts
