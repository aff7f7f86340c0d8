"""Loggers write what Lightning's write; MLflow and W&B get the calls of their documented interface."""

from __future__ import annotations

import csv
import dataclasses
import enum
import os
import pickle
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import drivetrain
import drivetrain.lightning as ours
from drivetrain.errors import ConfigurationError
from drivetrain.logger import SilentExperiment
from drivetrain_plugins.loggers import wandb as wandb_logger
from drivetrain_plugins.loggers.parameters import flatten
from drivetrain_plugins.loggers.saved_checkpoints import description
from tests.distributed import run_job
from tests.lightning_parts.both import classifier, compare, loader, trainer
from tests.lightning_parts.doubles import put_mlflow, put_wandb


def with_parameters(self: Any, *args: Any) -> None:
    self.save_hyperparameters({"lr": 0.1, "layers": [3, 5], "inner": {"kind": "tanh"}})


def rows(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    return [{key: float(value) for key, value in sorted(row.items()) if value} for row in found]


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: sorted((e.step, e.value) for e in found.Scalars(tag)) for tag in sorted(found.Tags()["scalars"])}


def files(folder: Path) -> list[str]:
    """Paths below, without the numbers that every run of TensorBoard has of its own."""
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(str(p.with_name("events") if p.name.startswith("events") else p) for p in found)


@pytest.mark.parametrize("parameters", [False, True])
def test_csv_and_tensorboard_in_a_run(tmp_path: Path, parameters: bool) -> None:
    def run(L: Any) -> dict[str, Any]:
        root = tmp_path / L.__name__
        loggers = [
            L.loggers.CSVLogger(root, name="c", prefix="p", flush_logs_every_n_steps=3),
            L.loggers.TensorBoardLogger(root, name="t", version="v", sub_dir="s", prefix="q"),
            L.loggers.TensorBoardLogger(root, default_hp_metric=False),
        ]
        module = classifier(L)
        if parameters:
            with_parameters(module)
        fit = trainer(L, root, logger=loggers, max_epochs=2, log_every_n_steps=2)
        fit.fit(module, loader(), loader(9))
        fit.validate(module, loader(9), verbose=False)
        tensorboard = [Path(logger.log_dir) for logger in loggers[1:]]
        named = [
            (lg.name, lg.version, os.path.relpath(lg.log_dir, root), os.path.relpath(lg.root_dir, root))
            for lg in loggers
        ]
        return {
            "rows": rows(root / "c" / "version_0" / "metrics.csv"),
            "events": [events(folder) for folder in tensorboard],
            "hparams": [yaml.safe_load((f / "hparams.yaml").read_text()) for f in tensorboard],
            "files": files(root),
            "named": named,
            "save_dir": [os.path.relpath(str(lg.save_dir), root) for lg in loggers],
            "text": [isinstance(lg.log_dir, str) and isinstance(lg.save_dir, str) for lg in loggers],
        }

    found = compare(run)
    assert len(found["rows"]) > 6 and any("p-val" in row for row in found["rows"])


def test_metrics_with_a_name_of_the_tables_own(tmp_path: Path) -> None:
    """Callbacks of projects log ``{"epoch": ..., "step": ...}``: the row's step is what was told or counted."""

    def run(L: Any) -> dict[str, Any]:
        logger = L.loggers.CSVLogger(tmp_path / L.__name__)
        for number in range(5):
            logger.log_metrics({"epoch": 0, "step": 40 + number, "loss": 0.5})
            logger.log_metrics({"step": 40 + number, "epoch": 0}, step=7 + number)
        logger.save()
        return {"rows": rows(Path(logger.log_dir, "metrics.csv"))}

    assert "40" not in str(compare(run)["rows"])


def test_a_stage_that_writes_nothing_leaves_no_file_of_events(tmp_path: Path) -> None:
    """A prediction after a fit, and a further fit after both."""

    def run(L: Any) -> dict[str, Any]:
        root, counted = tmp_path / L.__name__, []
        fit = trainer(L, root, logger=L.loggers.TensorBoardLogger(root), max_epochs=1, log_every_n_steps=1)
        module = classifier(L, predict_step=lambda self, batch, batch_idx: self(batch[0]).sum())
        for stage in (fit.fit, fit.predict, fit.predict, fit.fit):
            stage(module, loader())
            counted.append(sum("tfevents" in path.name for path in Path(fit.log_dir).iterdir()))
            fit.fit_loop.max_epochs = 2
        return {"counted": counted, "events": events(Path(fit.log_dir))}

    assert compare(run)["counted"] == [1, 1, 1, 2]


def test_what_a_module_calls_itself(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        folder = tmp_path / L.__name__
        logger = L.loggers.TensorBoardLogger(folder, name=None, version=7, log_graph=True)
        logger.log_metrics({"a": torch.tensor(1.5), "pair": {"x": 1.0, "y": 2.0}}, step=3)
        logger.log_hyperparams({"k": 1}, {"score": 2.0})
        logger.log_hyperparams({"k": 2}, 0.25)
        logger.experiment.add_text("said", "hello")
        module = classifier(L)
        module.example_input_array = torch.ones(2, 3)
        logger.log_graph(module)
        logger.finalize("success")
        read = EventAccumulator(str(folder / "version_7"))
        read.Reload()
        flat = L.loggers.CSVLogger(folder, name=None, version="flat", flush_logs_every_n_steps=1)
        flat.log_hyperparams({"k": 3})
        flat.log_metrics({"a": 1}, step=0)
        seen = rows(folder / "flat" / "metrics.csv")
        flat.experiment.log_metrics({"b": torch.tensor(2.0)}, step=1)
        flat.log_metrics({"b": 3.0})
        flat.save()
        return {
            "events": {tag: value for tag, value in events(folder / "version_7").items() if tag != "hp_metric"},
            "hp": [value for _, value in events(folder / "version_7").get("hp_metric", [])],
            "graph": read.Tags()["graph"],
            "flat": (seen, [list(row.items())[:2] for row in rows(folder / "flat" / "metrics.csv")][:2]),
        }

    compare(run)


def test_a_derived_logger_finds_what_it_calls_of_its_base(tmp_path: Path) -> None:
    """Projects write hyper-parameters with metrics by a logger of their own, with Lightning's private helpers."""

    def run(L: Any) -> dict[str, Any]:
        class Own(L.loggers.TensorBoardLogger):  # type: ignore[misc, name-defined]
            def log_hyperparams_metrics(self, params: dict[str, Any]) -> dict[str, Any]:
                return self._sanitize_params(_flatten_dict(_convert_params(params)))  # type: ignore[no-any-return]

        class Rows(L.loggers.CSVLogger):  # type: ignore[misc, name-defined]
            def following(self) -> int:
                return self._get_next_version()  # type: ignore[no-any-return]

        folder = tmp_path / L.__name__
        for name in ("t/version_3", "r/version_0"):
            (folder / name).mkdir(parents=True)
        own, rows = Own(folder, name="t"), Rows(folder, name="r")
        given = {"lr": np.float64(0.5), "of": {"kind": torch.nn.Tanh, "sizes": [1, 2]}, "x": torch.ones(2), "n": None}
        found = own.log_hyperparams_metrics({**given, "m": torch.ones(2, 2)})
        assert torch.equal(found.pop("x"), torch.ones(2))
        return {"params": found, "next": (own._get_next_version(), rows.following(), own.version, rows.version)}

    compare(run)


def test_other_workers_write_nothing_and_take_the_version() -> None:
    def work(rank: int, size: int) -> Any:
        import tempfile

        root = os.environ["SHARED"]
        module = classifier(ours)
        module.on_train_start = lambda: module.logger.experiment.add_scalar("mine", 1.0, 0)
        logger = ours.loggers.TensorBoardLogger(root)
        run = trainer(ours, tempfile.gettempdir(), strategy="ddp", devices=2, logger=logger, max_epochs=1)
        run.fit(module, loader())
        found = [str(logger.version), type(logger.experiment).__name__ if rank else "", str(run.log_dir)]
        run.close()
        return found

    import tempfile

    with tempfile.TemporaryDirectory() as root:
        os.environ["SHARED"] = root
        (first, silent) = run_job(work, 2)
        del os.environ["SHARED"]
        assert first[0] == silent[0] == "0" and first[2] == silent[2]
        assert silent[1] == "SilentExperiment"
        assert len([f for f in files(Path(root)) if f.endswith("events")]) == 1
        assert events(Path(first[2]))["mine"] == [(0, 1.0)]
    nothing = SilentExperiment()
    nothing[0].add_image("x", nothing.y(1), z=2)


class Saved:
    """What a checkpoint callback says of itself."""

    save_top_k, monitor, mode = 1, "val", "min"
    current_score = best_model_score = torch.tensor(0.5)

    def __init__(self, path: Path) -> None:
        path.write_bytes(b"weights")
        self.best_model_path, self.last_model_path, self.best_k_models = str(path), "", {}


class Kind(enum.Enum):
    WIDE = "wide"


@dataclasses.dataclass
class Options:
    width: int = 8
    taps: tuple[int, ...] = (1, 2)


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, described = put_mlflow(monkeypatch), []

    def read(run_id: str, folder: str, target: str) -> None:
        described.append(sorted(yaml.safe_load(Path(folder, "metadata.yaml").read_text())))

    monkeypatch.setattr(client, "log_artifacts", read, raising=False)
    logger = ours.loggers.MLFlowLogger(
        "mine", run_name="n", save_dir=str(tmp_path), tags={"a": 1}, prefix="p", log_model=True
    )
    assert client.calls == [] and logger.save_dir == str(tmp_path), "nothing happens before the first use"
    logger.log_hyperparams({f"k{i}": i for i in range(150)} | {"deep": {"x": "y" * 300}})
    with pytest.warns(RuntimeWarning, match="is written as p-ab"):
        logger.log_metrics({"a!b": torch.tensor(2.0), "c": 1}, step=4)
    logger.after_save_checkpoint(Saved(tmp_path / "best.ckpt"))
    assert not client.named("log_artifact")
    logger.finalize("completed")
    assert (logger.name, logger.version, logger.run_id, logger.experiment_id) == ("e1", "r1", "r1", "e1")
    assert client.named("create_run") == [(("e1", {"a": 1, "mlflow.runName": "n"}), {})]
    sent = [kwargs for _, kwargs in client.named("log_batch")]
    assert [len(batch["params"]) for batch in sent[:2]] == [100, 51]
    assert sent[1]["params"][-1].key == "deep/x" and len(sent[1]["params"][-1].value) == 250
    assert [(m.key, m.value, m.step) for m in sent[2]["metrics"]] == [("p-ab", 2.0, 4), ("p-c", 1.0, 4)]
    assert client.named("log_artifact") == [(("r1", str(tmp_path / "best.ckpt"), "best"), {})]
    assert described == [["Checkpoint", "original_filename", "score"]], "Lightning's names in metadata.yaml"
    assert client.calls[-1] == ("set_terminated", ("r1", "FINISHED"), {})
    again = ours.loggers.MLFlowLogger(run_id="r9", tracking_uri="http://127.0.0.1:9")
    assert (again.run_id, again.experiment_id, again.save_dir) == ("r9", "e7", None)
    every = ours.loggers.MLFlowLogger(log_model="all", save_dir=str(tmp_path))
    every.after_save_checkpoint(Saved(tmp_path / "now.ckpt"))
    every.after_save_checkpoint(Saved(tmp_path / "best.ckpt"))
    assert [args[2] for args, _ in client.named("log_artifact")] == ["best", "now", "best"]
    every.finalize("failed")
    assert client.calls[-1][1] == ("r1", "FAILED")


def test_one_level_of_parameters_is_that_of_lightning() -> None:
    """MLflow and TensorBoard hold texts, by which runs of both are compared: lists of parts, tuples, classes, enums."""
    params = {
        "blocks": [{"size": 3, "kind": Kind.WIDE}, {"size": 5, "taps": (1, 2)}],
        "mixed": [{"size": 3}, 4],
        "pair": ({"size": 3},),
        "betas": (0.9, 0.999),
        "optimizer": torch.optim.SGD,
        "layer": torch.nn.ReLU(),
        "kind": Kind.WIDE,
        "options": Options(),
        "several": [Options()],
        "config": OmegaConf.create({"widths": [1, 2], "blocks": [{"size": 1}], "none": None}),
        "given": Namespace(path=Path("data"), numbers=np.arange(2), seen={1}, rate=np.float32(0.5)),
        7: {"key": True},
    }
    theirs_flat = _flatten_dict(_convert_params(dict(params)))
    assert {k: str(v) for k, v in flatten(params).items()} == {k: str(v) for k, v in theirs_flat.items()}
    assert flatten({"blocks": [], "part": {}, "f": len, "one": torch.tensor(2.0)}) == {
        "blocks": "[]",
        "part": "{}",
        "f": "len",
        "one": 2.0,
    }, "what is empty is not lost, and there are no addresses"


def test_the_module_of_wandbs_run_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's logger imports it, so that projects ask ``isinstance(logger.experiment, wandb.wandb_run.Run)``."""
    package = tmp_path / "wandb"
    package.mkdir()
    (package / "__init__.py").write_text("from unittest.mock import Mock\n\nrun, init = None, Mock()\n")
    (package / "wandb_run.py").write_text("class Run: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("wandb", "wandb.wandb_run"):
        monkeypatch.setitem(sys.modules, name, None)  # so that what this test imports is taken back
        del sys.modules[name]
    assert ours.loggers.WandbLogger(project="p", save_dir=tmp_path).experiment is not None
    assert isinstance(sys.modules["wandb"].wandb_run.Run, type)


def test_values_of_all_kinds_in_a_file_of_rows(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        logger = L.loggers.CSVLogger(tmp_path / L.__name__, name="", version="")
        values = {"text": "a, b", "truth": True, "count": torch.tensor(3), "half": torch.tensor([0.5]), "none": None}
        logger.log_metrics({**values, "single": np.float32(0.1), "whole": np.int64(2), "number": 0.1}, step=1)
        logger.log_metrics({"late": "x"}, step=2)
        logger.save()
        with pytest.raises((ValueError, RuntimeError)):
            logger.log_metrics({"many": torch.ones(2)})
        with (tmp_path / L.__name__ / "metrics.csv").open(newline="") as file:
            return {"rows": [dict(sorted(row.items())) for row in csv.DictReader(file)]}

    assert compare(run)["rows"][0]["text"] == "a, b"


@pytest.mark.parametrize("lightnings_meaning", [True, False])
def test_the_run_of_wandb_begins_before_other_loggers_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lightnings_meaning: bool
) -> None:
    """With ``sync_tensorboard`` it follows the writers that begin after it."""
    _, begun = put_wandb(monkeypatch)
    seen: list[int] = []

    class Board(ours.loggers.TensorBoardLogger):
        @property
        def experiment(self) -> Any:
            seen.append(len(begun))
            return super().experiment

        def log_hyperparams(self, *args: Any, **options: Any) -> None:
            seen.append(len(begun))
            super().log_hyperparams(*args, **options)

    loggers = [Board(tmp_path), ours.loggers.WandbLogger(save_dir=tmp_path, sync_tensorboard=True)]
    if lightnings_meaning:
        fit = trainer(ours, tmp_path, logger=loggers, max_epochs=1)
    else:
        fit = drivetrain.Trainer(devices=1, logger=loggers, max_epochs=1, default_root_dir=tmp_path)
    fit.fit(classifier(ours), loader())
    assert seen and set(seen) == {1}, "not before the run of wandb"
    assert fit.logger is loggers[0]


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, begun = put_wandb(monkeypatch)
    logger = ours.loggers.WandbLogger(
        name="n", save_dir=tmp_path, version="v", project="p", prefix="x", log_model="all", tags=["t"]
    )
    assert begun == [] and (logger.name, logger.version, logger.save_dir) == ("p", "v", str(tmp_path))
    logger.log_hyperparams({"lr": 0.1, "inner": {"f": len}})
    logger.log_metrics({"a": 1.0}, step=3)
    logger.log_image("pictures", ["one", "two"], step=4, caption=["1", "2"])
    logger.log_text("words", columns=["c"], data=[["d"]])
    logger.watch(torch.nn.Linear(1, 1), log="all")
    logger.after_save_checkpoint(Saved(tmp_path / "best.ckpt"))
    logger.finalize("completed")
    assert begun[0] == {"name": "n", "project": "p", "dir": str(tmp_path), "id": "v", "resume": "allow", "tags": ["t"]}
    assert run.config.calls == [("update", ({"lr": 0.1, "inner": {"f": "len"}},), {"allow_val_change": True})]
    logged = [args[0] for args, _ in run.named("log")]
    assert logged[0] == {"x-a": 1.0, "trainer/global_step": 3}
    assert logged[1]["x-pictures"][1] == ("Image", ("two",), {"caption": "2"})
    assert logged[2]["x-words"][0] == "Table"
    assert run.named("watch")[0][1]["log"] == "all"
    (((artifact,), options),) = run.named("log_artifact")
    assert artifact.name == "model-w1" and options == {"aliases": ["latest", "best"]}
    assert artifact.named("add_file")[0][0] == (str(tmp_path / "best.ckpt"),)
    assert logger.version == "w1"
    with pytest.raises(ValueError, match="2 items and 1 of caption"):
        logger.log_image("x", [1, 2], caption=["1"])
    with pytest.raises(ConfigurationError, match="offline=True"):
        ours.loggers.WandbLogger(offline=True, log_model=True)
    offline = ours.loggers.WandbLogger(offline=True, save_dir=tmp_path)
    offline.log_metrics({"a": 1.0})
    assert begun[1]["mode"] == "offline" and begun[1]["project"] == "lightning_logs"


@pytest.mark.parametrize("folder", [None, ".", "runs"])
def test_workers_write_to_the_run_that_the_script_holds(
    folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``logger.watch(module)`` in the script begins the run, and wandb begins a run of one id in one process only."""
    run, begun = put_wandb(monkeypatch)
    monkeypatch.setattr(wandb_logger, "current_job", lambda: SimpleNamespace(origin="local"))
    monkeypatch.chdir(tmp_path)
    logger = ours.loggers.WandbLogger() if folder == "." else ours.loggers.WandbLogger(save_dir=folder)
    fresh = pickle.loads(pickle.dumps(logger))  # nothing has begun: the worker's own
    fresh.log_metrics({"a": 1.0})
    fresh.finalize("success")
    assert run.named("finish") and len(begun) == 1
    logger.watch(torch.nn.Linear(1, 1))
    worker = pickle.loads(pickle.dumps(logger))
    worker.log_metrics({"a": 1.0}, step=3)
    held = worker.experiment
    # Of a run that is gone on with wandb does not know where its files lie.
    told = [] if folder is None else [{"set up": {"root_dir": str(tmp_path / folder)}}]
    assert begun[2:] == [*told, {"attached": "w1"}]
    assert held.named("log") == [(({"a": 1.0, "trainer/global_step": 3},), {})]
    worker.finalize("success")
    assert not held.named("finish") and worker.version == "w1"  # the script goes on with it
    run._is_finished = True
    after = pickle.loads(pickle.dumps(logger))
    after.log_metrics({"a": 2.0})
    assert begun[3 + len(told)]["id"] == "w1"  # it has ended: gone on with by its id


def test_what_a_dataclass_holds_beside_its_fields_is_written(tmp_path: Path) -> None:
    """As of a project's that takes whatever its configuration file says."""

    @dataclasses.dataclass
    class Settings:
        rate: float = 0.1

    settings = Settings()
    settings.batch_size, settings._cache = 4, object()  # type: ignore[attr-defined]
    logger = ours.loggers.CSVLogger(tmp_path, name="n", version=0)
    logger.log_hyperparams({"settings": settings})
    logger.save()
    assert yaml.safe_load((tmp_path / "n" / "version_0" / "hparams.yaml").read_text()) == {
        "settings": {"rate": 0.1, "batch_size": 4}
    }


def test_a_score_that_is_a_whole_number_stays_one(tmp_path: Path) -> None:
    for score in torch.tensor(3), torch.tensor(0.5), None:
        told = description(Saved(tmp_path / "x.ckpt"), "x.ckpt", score)["score"]
        assert (told, type(told)) == {3: (3, int), 0.5: (0.5, float), None: (None, type(None))}[told]


@pytest.mark.parametrize("name", ["MLFlowLogger", "WandbLogger"])
def test_a_missing_package_is_named_before_workers_would_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = {"MLFlowLogger": "mlflow", "WandbLogger": "wandb"}[name]
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ConfigurationError, match=f"{name} needs the package {package}: pip install {package}") as told:
        getattr(ours.loggers, name)()
    assert isinstance(told.value, ModuleNotFoundError), "what projects catch to take another logger"


def test_a_dummy_takes_every_call() -> None:
    dummy = ours.loggers.logger.DummyLogger()
    assert dummy.log_hyperparams("a", 2, three="three") is None
    assert dummy.log_metrics("a", 2, three="three") is None
    assert dummy.anything("a", b=2) is None


class Duck:
    """Derives from no Logger: what Lightning asks of one, and no more."""

    name, version = "duck", 3
    experiment = None

    def __init__(self, save_dir: Path) -> None:
        self.save_dir = str(save_dir)
        self.calls: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append(["metrics", sorted(metrics), step])

    def log_hyperparams(self, params: Any) -> None:
        self.calls.append(["parameters", sorted(params)])

    def log_graph(self, model: Any) -> None:
        self.calls.append(["graph"])

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.calls.append(["saved", os.path.basename(checkpoint_callback.best_model_path)])

    def save(self) -> None:
        self.calls.append(["save"])

    def finalize(self, status: str) -> None:
        self.calls.append(["end", status])


class Delegating:
    """Whatever it is asked, it asks another."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


@pytest.mark.parametrize("kind", ["alone", "delegating", "listed"])
def test_a_logger_that_derives_from_none(tmp_path: Path, kind: str) -> None:
    def run(L: Any) -> dict[str, Any]:
        duck = Duck(tmp_path / L.__name__)
        given: Any = duck if kind == "alone" else Delegating(duck)
        loggers = [L.loggers.CSVLogger(tmp_path / L.__name__), given] if kind == "listed" else given
        module = classifier(L)
        with_parameters(module)
        fit = trainer(L, tmp_path, logger=loggers, max_epochs=2, log_every_n_steps=2, enable_checkpointing=True)
        fit.fit(module, loader(), loader(9))
        assert given in fit.loggers and (kind == "listed" or fit.logger is given is module.logger)
        folder = os.path.relpath(fit.checkpoint_callback.dirpath, tmp_path / L.__name__)
        # Lightning gives an epoch's rows when its checkpoint is made, drivetrain before; see coming-from-lightning.md.
        return {"calls": sorted(duck.calls, key=str), "order": [c[0] for c in duck.calls[:6]], "folder": folder}

    assert ["end", "success"] in compare(run)["calls"]


def test_a_mock_of_a_logger_is_one(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        logger = Mock(spec=L.loggers.Logger)
        fit = trainer(L, tmp_path, logger=logger, max_epochs=2, log_every_n_steps=2)
        fit.fit(classifier(L), loader(), loader(9))
        metrics = [call.kwargs for call in logger.log_metrics.call_args_list]
        rows = sorted([sorted(one["metrics"]), one["step"]] for one in metrics)
        return {"rows": rows, "end": logger.finalize.call_args_list[-1].args}

    assert compare(run)["rows"]


def test_statistics_of_the_device_go_to_a_logger_that_parts_no_groups(tmp_path: Path) -> None:
    duck = Duck(tmp_path)
    watching = ours.callbacks.DeviceStatsMonitor()
    fit = trainer(ours, tmp_path, logger=duck, max_epochs=1, log_every_n_steps=1, callbacks=[watching])
    fit.fit(classifier(ours), loader())
    written = {name for call in duck.calls if call[0] == "metrics" for name in call[1]}
    assert "DeviceStatsMonitor.on_train_batch_start/cpu_percent" in written


def test_what_a_logger_of_another_kind_lacks_is_told(tmp_path: Path) -> None:
    class Half:
        name = "half"

        def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    with pytest.raises(ConfigurationError, match="Half is no Logger and has no version, save_dir, log_hyperparams, "):
        ours.Trainer(logger=Half())


@pytest.mark.filterwarnings("ignore")
def test_a_logger_that_derives_from_none_on_two_ranks(tmp_path: Path) -> None:
    class Writing(Duck):
        def finalize(self, status: str) -> None:
            super().finalize(status)
            (tmp_path / "calls").write_text(str(self.calls))

    fit = trainer(ours, tmp_path, logger=Writing(tmp_path), strategy="ddp", devices=2, max_epochs=1)
    fit.fit(classifier(ours), loader())
    assert "['end', 'success']" in (tmp_path / "calls").read_text()
