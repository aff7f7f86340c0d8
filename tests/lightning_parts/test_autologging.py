"""``mlflow.pytorch.autolog()`` is heard: what MLflow puts around Lightning's ``fit`` is put around the facade's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import drivetrain.lightning as ours
from tests.lightning_parts.both import classifier, loader, trainer
from tests.lightning_parts.doubles import Recorder


class Epochs(ours.Callback):
    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(trainer.current_epoch)


class Mlflow:
    """MLflow's names that this goes by: a function of its own around ``fit``, put there and taken off by MLflow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.off, self.around, self.epochs, self.run = True, 0, [], Recorder()  # type: ignore[var-annotated]
        self.joined = [os.getpid()]

        def patched_fit(original: Callable[..., Any], fit: Any, *args: Any, **kwargs: Any) -> Any:
            self.around += 1
            fit.callbacks += [Epochs(self.epochs)]
            assert isinstance(args[0] if args else kwargs["model"], ours.LightningModule), "MLflow reads it here"
            return original(fit, *args, **kwargs)

        def safe_patch(name: str, kind: type, of: str, patch: Callable[..., Any], manage_run: bool) -> None:
            original = getattr(kind, of)
            monkeypatch.setattr(kind, of, lambda *args, **kwargs: patch(original, *args, **kwargs))

        for name, attributes in {
            "mlflow": {key: getattr(self.run, key) for key in ("log_params", "log_metrics", "log_artifact")}
            | {"active_run": self.active_run, "get_tracking_uri": lambda: "file:here"}
            | {"set_tracking_uri": self.run.set_tracking_uri, "start_run": self.start_run},
            "mlflow.utils": {},
            "mlflow.utils.autologging_utils": {
                "autologging_is_disabled": lambda name: self.off,
                "get_autologging_config": lambda name, key, default: default,
                "safe_patch": safe_patch,
            },
            "mlflow.pytorch": {},
            "mlflow.pytorch._lightning_autolog": {"patched_fit": patched_fit},
        }.items():
            module = ModuleType(name)
            module.__dict__.update(attributes)
            monkeypatch.setitem(sys.modules, name, module)

    def active_run(self) -> Any:
        """A run is active in the process that began it or joined it."""
        return SimpleNamespace(info=SimpleNamespace(run_id="r1")) if os.getpid() in self.joined else None

    def start_run(self, run_id: str) -> None:
        self.joined.append(os.getpid())


class Active(ours.Callback):
    """Notes whether a run is active in the first rank when training starts, and what was told to MLflow for that."""

    def __init__(self, mlflow: Mlflow) -> None:
        self._mlflow = mlflow

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.process, self.active = os.getpid(), self._mlflow.active_run() is not None
        self.address = [args[0] for args, _ in self._mlflow.run.named("set_tracking_uri")]


def test_a_worker_writes_to_the_run_of_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = Mlflow(monkeypatch)
    mlflow.off = False
    for devices, address in ((1, []), (2, ["file:here"])):
        look = Active(mlflow)
        run = trainer(ours, tmp_path, strategy="ddp", devices=devices, max_epochs=1, callbacks=[look])
        run.fit(classifier(ours), loader())
        assert (look.process == os.getpid(), look.active, look.address) == (devices == 1, True, address)
        assert not [one for one in run.callbacks if type(one).__name__ == "JoinRun"], "it is this fit's only"


def test_what_was_asked_for_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = Mlflow(monkeypatch)
    trainer(ours, tmp_path, max_epochs=1).fit(classifier(ours), loader())
    assert mlflow.around == 0, "autolog() was not called"
    mlflow.off = False
    stopping = ours.callbacks.EarlyStopping("val", patience=1, min_delta=10.0)
    saver = ours.callbacks.ModelCheckpoint(tmp_path, "best", "val")
    stopped = trainer(ours, tmp_path, callbacks=[stopping, saver], enable_checkpointing=True)
    stopped.fit(classifier(ours), loader(), loader(8))
    assert (mlflow.around, mlflow.epochs, stopped.current_epoch) == (1, [0, 1], 2)
    (((params,), _),) = mlflow.run.named("log_params")
    assert params == {"monitor": "val", "mode": "min", "patience": 1, "min_delta": -10.0, "stopped_epoch": 0}
    (((metrics,), _),) = mlflow.run.named("log_metrics")
    assert metrics | {"best_score": 0} == {"stopped_epoch": 1, "restored_epoch": 0, "best_score": 0, "wait_count": 1}
    sent = {"local_path": saver.best_model_path, "artifact_path": "restored_model_checkpoint"}
    assert mlflow.run.named("log_artifact") == [((), sent)]
    trainer(ours, tmp_path, max_epochs=1).fit(model=classifier(ours), train_dataloaders=loader())
    assert mlflow.around == 2, "once around each fit"


def test_it_is_written_where_something_else_is_around_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that put a function of its own around ``Trainer.fit`` first is called once, and takes nothing away."""
    mlflow, calls, fit = Mlflow(monkeypatch), [], ours.Trainer.fit

    def of_another_tool(*args: Any, **kwargs: Any) -> None:
        calls.append(kwargs)
        fit(*args, **kwargs)

    monkeypatch.setattr(ours.Trainer, "fit", of_another_tool)
    mlflow.off = False
    for number in (1, 2):
        trainer(ours, tmp_path, max_epochs=1).fit(classifier(ours), train_dataloaders=loader())
        assert (mlflow.around, len(calls)) == (number, number)


def test_that_it_cannot_be_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = Mlflow(monkeypatch)
    mlflow.off = False
    monkeypatch.setitem(sys.modules, "mlflow.pytorch._lightning_autolog", None)  # as without Lightning's package
    with pytest.warns(UserWarning, match="writes nothing of this fit .*: give the Trainer an MLFlowLogger"):
        trainer(ours, tmp_path, max_epochs=1).fit(classifier(ours), loader())
