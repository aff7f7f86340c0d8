"""Metric objects that training and validation both log, so that validation resets them before training's epoch ends:
what callbacks, loggers and the bar are shown at every moment is what Lightning shows, nan included."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric

from tests.facade.recorder import QUIET

Step = Callable[[Any, torch.Tensor], Any]
LATE = ["on_train_epoch_end", "on_validation_end"]
HOOKS = [
    *LATE,
    "on_train_epoch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_train_end",
]


def logs(name: str, call: bool = True, reset: bool = False, **how: Any) -> Step:
    def step(module: Any, value: torch.Tensor) -> None:
        if call:
            module.metric(value)
        module.log(name, module.metric, **how)
        if reset:
            module.metric.reset()

    return step


def logs_all(prefix: str, *names: str, update: str) -> Step:
    def step(module: Any, value: torch.Tensor) -> None:
        getattr(module, update).update(value)
        parts = {f"{prefix}_{name}": module.get_submodule(name) for name in names}
        module.log_dict(parts, on_step=False, on_epoch=True)

    return step


def composed() -> dict[str, Any]:
    near, far = MeanMetric(), MeanMetric()
    return {"near": near, "far": far, "both": near + far}


SHAPES: dict[str, tuple[Callable[[], dict[str, Any]], Step, Step]] = {
    "epoch": (
        lambda: {"metric": MeanMetric()},
        logs("train", on_step=False, on_epoch=True, prog_bar=True),
        logs("val", prog_bar=True),
    ),
    "both": (
        lambda: {"metric": SumMetric()},
        logs("train", on_step=True, on_epoch=True),
        logs("val", on_step=True, on_epoch=True),
    ),
    "one name": (lambda: {"metric": MeanMetric()}, logs("mean", on_step=False, on_epoch=True), logs("mean")),
    "never updated": (
        lambda: {"metric": MeanMetric()},
        logs("train", call=False, on_step=False, on_epoch=True),
        logs("val", call=False),
    ),
    "reset by the module": (
        lambda: {"metric": MeanMetric()},
        logs("train", reset=True, on_step=False, on_epoch=True),
        logs("val", reset=True),
    ),
    "collection": (
        lambda: {"metrics": MetricCollection({"mean": MeanMetric(), "max": MaxMetric()})},
        logs_all("train", "metrics.mean", "metrics.max", update="metrics"),
        logs_all("val", "metrics.mean", "metrics.max", update="metrics"),
    ),
    "composition": (
        composed,
        logs_all("train", "both", "near", update="both"),
        logs_all("val", "both", "near", update="both"),
    ),
}

RUNS: dict[str, dict[str, Any]] = {
    "often looked at": {"hooks": HOOKS, "num_sanity_val_steps": 2},
    "looked at late": {"hooks": LATE, "num_sanity_val_steps": 2},
    "two loaders": {"hooks": HOOKS, "loaders": 2},
    "within the epoch": {"hooks": LATE, "val_check_interval": 2},
    "every second epoch": {"hooks": LATE, "check_val_every_n_epoch": 2},
    "begun anew in the hook of the end": {"hooks": LATE, "at_end": lambda metric: metric.reset()},
    "begun anew there, looked at": {"hooks": HOOKS, "at_end": lambda metric: metric.reset(), "num_sanity_val_steps": 2},
    "added to there": {"hooks": LATE, "at_end": lambda metric: metric.update(torch.tensor(7.0)), "loaders": 2},
    "added to there, one loader": {"hooks": LATE, "at_end": lambda metric: metric.update(torch.tensor(7.0))},
}


def shown(
    library: str,
    shape: str,
    folder: Path,
    hooks: list[str],
    loaders: int = 1,
    at_end: Callable[[Any], None] | None = None,
    **options: Any,
) -> list[str]:
    """Every metric that is known at each of ``hooks``, and each row that the logger was given; ``at_end``: what the
    module's hooks of an epoch's end do with each metric."""
    L = importlib.import_module(library)
    make, train, validate = SHAPES[shape]
    seen: list[str] = []

    def note(*what: Any) -> None:
        plain = [sorted((k, float(v)) for k, v in one.items()) if isinstance(one, dict) else one for one in what]
        seen.append(repr(plain))

    class Rows(importlib.import_module(f"{library}.loggers").CSVLogger):  # type: ignore[misc]
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            note("row", step, metrics)

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            for name, metric in make().items():
                setattr(self, name, metric)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch).mean()
            train(self, loss.detach())
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            validate(self, batch.mean() + dataloader_idx)

        def on_validation_epoch_end(self) -> None:
            self.change()

        def on_train_epoch_end(self) -> None:
            self.change()

        def change(self) -> None:
            for metric in self.children():
                if at_end is not None and isinstance(metric, MeanMetric | SumMetric):
                    at_end(metric)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    class Looks(L.Callback):  # type: ignore[misc]
        pass

    def looks(hook: str) -> Any:
        def look(self: Any, trainer: Any, *rest: Any) -> None:
            note(hook, dict(trainer.callback_metrics), dict(trainer.logged_metrics), trainer.progress_bar_metrics)

        return look

    for hook in hooks:
        setattr(Looks, hook, looks(hook))
    torch.manual_seed(0)
    data = torch.randn(6, 2)
    validation = [DataLoader(torch.randn(4, 2), batch_size=2) for _ in range(loaders)]
    settings = {**QUIET, "max_epochs": 2, "logger": Rows(folder), "callbacks": [Looks()], "log_every_n_steps": 1}
    L.Trainer(**{**settings, **options}).fit(Module(), DataLoader(data, batch_size=2), validation)
    return seen


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's own, of metrics without data
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_shown(shape: str, run: str, tmp_path: Path) -> None:
    theirs = shown("lightning.pytorch", shape, tmp_path, **RUNS[run])
    assert shown("drivetrain.lightning", shape, tmp_path, **RUNS[run]) == theirs
    assert len(theirs) > 5
