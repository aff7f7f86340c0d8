"""Recording test doubles of the packages mlflow and wandb: they have the calls that the loggers make and keep them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Recorder:
    """Keeps every call made on it as ``(name, args, kwargs)``."""

    def __init__(self, **attributes: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


class Client(Recorder):
    """The double of ``MlflowClient``."""

    def get_experiment_by_name(self, name: str) -> Any:
        return None

    def create_experiment(self, name: str, artifact_location: Any = None) -> str:
        self.calls.append(("create_experiment", (name, artifact_location), {}))
        return "e1"

    def create_run(self, experiment_id: str, tags: dict[str, Any]) -> Any:
        self.calls.append(("create_run", (experiment_id, tags), {}))
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id, experiment_id="e7"))


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def put_mlflow(monkeypatch: pytest.MonkeyPatch) -> Client:
    """Stand in for mlflow; returns the client that the logger gets."""
    client = Client()
    _module(monkeypatch, "mlflow", set_tracking_uri=lambda uri: client.calls.append(("set_tracking_uri", (uri,), {})))
    _module(monkeypatch, "mlflow.tracking", MlflowClient=lambda uri: client)
    _module(monkeypatch, "mlflow.tracking.context")
    _module(monkeypatch, "mlflow.tracking.context.registry", resolve_tags=lambda tags: tags)
    _module(monkeypatch, "mlflow.utils")
    _module(monkeypatch, "mlflow.utils.mlflow_tags", MLFLOW_RUN_NAME="mlflow.runName")
    _module(monkeypatch, "mlflow.entities", Param=SimpleNamespace, Metric=SimpleNamespace)
    return client


def put_wandb(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, list[dict[str, Any]]]:
    """Stand in for wandb; returns its run and the arguments of ``init``."""
    run, begun = Recorder(id="w1", name="shown", config=Recorder(), _attach_id="w1", _is_finished=False), []

    def init(**settings: Any) -> Recorder:
        begun.append(settings)
        return run

    def attach(run_id: str) -> Recorder:
        begun.append({"attached": run_id})
        return Recorder(id=run_id)

    def setup(settings: dict[str, Any]) -> None:
        begun.append({"set up": settings})

    made = {name: (lambda *args, kind=name, **kw: (kind, args, kw)) for name in ("Table", "Image", "Audio", "Video")}
    made |= {"setup": setup, "Settings": dict}
    _module(monkeypatch, "wandb", init=init, attach=attach, run=None, Artifact=Recorder, **made)
    return run, begun
