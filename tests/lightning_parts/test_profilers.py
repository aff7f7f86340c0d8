"""Profilers: which actions they see, what they write, and that nothing calls them where there is none."""

from __future__ import annotations

import json
import os
import pstats
from pathlib import Path
from typing import Any

import lightning.pytorch as theirs
import pytest
import torch
from torch.profiler import ProfilerAction

import drivetrain.lightning as ours
from drivetrain.errors import ConfigurationError
from drivetrain.hooks import Hooks
from tests.distributed import run_alone
from tests.lightning_parts.both import classifier, close, compare, loader, trainer, weights


class Watch(ours.Callback):
    def on_train_batch_end(self, *args: Any) -> None: ...


def measure(module: Any) -> None:
    with module.trainer.profiler.profile("mine"):
        pass


def test_actions_and_files_are_those_of_lightning(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        class Watch(L.Callback):
            def on_train_batch_end(self, *args: Any) -> None: ...

        folder = tmp_path / L.__name__
        profiler = L.profilers.SimpleProfiler(folder, "report")
        module = classifier(L, on_after_backward=measure)
        fit = trainer(L, folder, profiler=profiler, callbacks=[Watch()], max_epochs=2)
        fit.fit(module, loader(), loader(9))
        fit.predict(module, loader(9))
        calls = {name: len(found) for name, found in profiler.recorded_durations.items()}
        wanted = [
            "run_training_epoch",
            "run_training_batch",
            "training_step",
            "validation_step",
            "predict_step",
            "backward",
            "optimizer_step",
            "on_train_batch_end",
            "mine",
        ]
        named = [name for name in calls if name.endswith(("Watch.on_train_batch_end", "Module.optimizer_step"))]
        found = (folder / "fit-report.txt").read_text()
        return {
            "calls": {
                w: sum(
                    n
                    for name, n in calls.items()
                    if name == w or name.endswith(f"Watch.{w}" if w == "on_train_batch_end" else f".{w}")
                )
                for w in wanted
            },
            "named": sorted(named),
            "files": sorted(os.listdir(folder)),
            "report": [
                found.splitlines()[0],
                *[word in found for word in ("Action", "Num calls", "Percentage %", "100 %")],
            ],
        }

    found = compare(run)
    assert found["calls"]["training_step"] == 12 and found["calls"]["mine"] == 12


def test_what_a_project_has_of_its_own_beside_the_steps_is_an_action(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, int]:
        class Data(L.LightningDataModule):
            def prepare_data(self) -> None: ...

            def setup(self, stage: str) -> None: ...

            def train_dataloader(self) -> Any:
                return loader()

            def val_dataloader(self) -> Any:
                return loader(9)

        def alone(module: Any) -> Any:
            return loader(8)

        def calls(module: Any, expected: list[str], **options: Any) -> dict[str, int]:
            profiler = L.profilers.SimpleProfiler()
            trainer(L, tmp_path, profiler=profiler, max_epochs=2).fit(module, **options)
            return {name: len(profiler.recorded_durations[name]) for name in expected}

        data, module = "[LightningDataModule]Data.", "[LightningModule]Module."
        of_data = [f"{data}{name}" for name in ("prepare_data", "setup", "train_dataloader", "val_dataloader")]
        of_module = [f"{module}{name}" for name in ("setup", "teardown", "configure_optimizers")]
        own = classifier(L, setup=lambda self, stage: None, teardown=lambda self, stage: None)
        found = calls(own, of_data + of_module, datamodule=Data())
        return found | calls(classifier(L, train_dataloader=alone), [f"{module}train_dataloader"])

    assert set(compare(run).values()) == {1}


def test_without_a_profiler_nothing_is_put_around_anything(tmp_path: Path) -> None:
    """The objects of the run are as they are: the loop calls the plain methods."""
    seen: list[Any] = []

    class Look(ours.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            owners = (trainer.fit_loop, trainer.strategy, pl_module)
            names = ("_window", "backward", "optimizer_step", "training_step")
            seen.append([name in owner.__dict__ for owner in owners for name in names])
            seen.append(
                [type(trainer.hooks) is not Hooks, "read" in trainer.train_source.__dict__, trainer.instruments]
            )

    fit = trainer(ours, tmp_path, callbacks=[Look()], max_epochs=1)
    fit.fit(classifier(ours), loader())
    assert seen and not any(any(one) for one in seen)
    with fit.profiler.profile("x"):
        assert not fit.profiler.measures and fit.profiler.summary() == ""
    assert type(fit.profiler) is ours.profilers.PassThroughProfiler


def test_a_profiled_run_is_the_same_run_and_leaves_nothing_on_its_objects(tmp_path: Path, capsys: Any) -> None:
    plain, watched = classifier(ours), classifier(ours)
    trainer(ours, tmp_path, callbacks=[Watch()]).fit(plain, loader(), loader(9))
    fit = trainer(ours, tmp_path, callbacks=[Watch()], profiler="simple")
    fit.fit(watched, loader(), loader(9))
    assert "FIT Profiler Report" in capsys.readouterr().out
    assert close(weights(plain), weights(watched)) and "training_step" not in watched.__dict__
    assert "backward" not in fit.strategy.__dict__
    broken = classifier(ours, training_step=lambda self, batch, batch_idx: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer(ours, tmp_path, profiler="simple").fit(broken, loader())
    assert "run_training_batch" in capsys.readouterr().out, "the report comes after an error too"
    simple = ours.profilers.SimpleProfiler(extended=False)
    with simple.profile("a"), pytest.raises(ValueError, match="a has been started"):
        simple.start("a")
    with pytest.raises(ValueError, match="never started"):
        simple.stop("b")
    assert "Mean duration" in simple.summary() and "Percentage" not in simple.summary()
    with pytest.raises(ConfigurationError, match="profiler=3 is no Profiler"):
        trainer(ours, tmp_path, profiler=3)


def test_advanced(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    profiler = ours.profilers.AdvancedProfiler(folder, "deep", line_count_restriction=5, dump_stats=True)
    trainer(ours, tmp_path, profiler=profiler, max_epochs=1).fit(classifier(ours), loader())
    text = (folder / "fit-deep.txt").read_text()
    assert "Profile stats for: run_training_batch" in text and "cumulative" in text
    dumped = next(folder.glob("fit-deep-*training_step.prof"))
    assert any("cross_entropy" in name for _, _, name in pstats.Stats(str(dumped)).stats)
    with pytest.raises(ValueError, match="never started"):
        profiler.stop("x")


def test_a_step_that_was_set_on_the_module_is_measured_and_stays(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        profiler = L.profilers.SimpleProfiler()
        module = classifier(L)
        module.training_step = own = module.training_step
        fit = trainer(L, tmp_path, profiler=profiler, max_epochs=2)
        fit.fit(module, loader())
        times = [len(found) for name, found in profiler.recorded_durations.items() if name.endswith(".training_step")]
        return {"times": times, "stays": module.training_step is own}

    compare(run)


def test_pytorch(tmp_path: Path) -> None:
    run_alone(_pytorch, tmp_path)  # it leaves a thread of its own


def _pytorch(tmp_path: Path) -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    profiler = ours.profilers.PyTorchProfiler(tmp_path, "ops", schedule=schedule, sort_by_key="count", row_limit=-1)
    trainer(ours, tmp_path, profiler=profiler, max_epochs=1).fit(classifier(ours), loader())
    text = (tmp_path / "fit-ops.txt").read_text()
    assert "aten::linear" in text and "[pl][module]torch.nn.modules.linear.Linear: head" in text
    (trace,) = tmp_path.glob("fit-ops*.pt.trace.json")
    steps = {e["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"].startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}, "the schedule's two active steps"
    assert trace.name.startswith("fit-ops-[Strategy]Single.training_step."), "Lightning names a step's action too"
    assert profiler.function_events is not None
    linears = sum(event.name == "aten::linear" for event in profiler.function_events)
    assert linears > 0
    assert "aten::linear" in profiler.summary(), "after the stage, too"
    ready: list[Any] = []
    called = ours.profilers.PyTorchProfiler(tmp_path / "c", "c", schedule=schedule, on_trace_ready=ready.append)
    trainer(ours, tmp_path, profiler=called, max_epochs=1).fit(classifier(ours), loader())
    assert [type(each) for each in ready] == [torch.profiler.profile]
    assert not list((tmp_path / "c").glob("*.json")), "its own writes"
    few = ours.profilers.PyTorchProfiler(tmp_path / "few", "few")
    trainer(ours, tmp_path, profiler=few).predict(classifier(ours), loader(8))
    assert list((tmp_path / "few").glob("predict-few*.json"))
    for wrong in (
        {"sort_by_key": "cpu_tim"},
        {"schedule": 3},
        {"table_kwargs": {"row_limit": 1}},
        {"table_kwargs": {"x": 1}},
    ):
        with pytest.raises(ConfigurationError, match="PyTorchProfiler"):
            ours.profilers.PyTorchProfiler(**wrong)


def test_pytorch_records_a_cycle_of_each_kind_of_step(tmp_path: Path) -> None:
    run_alone(_cycles, tmp_path)


def _cycles(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        folder = tmp_path / L.__name__
        fit = trainer(L, folder, profiler=L.profilers.PyTorchProfiler(folder, "ops"), num_sanity_val_steps=2)
        module = classifier(L)
        fit.fit(module, loader(), loader())
        fit.predict(module, loader(9))
        return {"traces": sorted((f.name.split("-")[0], f.name.split(".")[1]) for f in folder.glob("*.json"))}

    found = compare(run)["traces"]
    assert found == [("fit", "training_step"), ("fit", "validation_step"), ("predict", "predict_step")]
    (trace,) = (tmp_path / ours.__name__).glob("fit-*.training_step.*.json")
    steps = {e["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"].startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"}, "the default schedule's active steps"
    (report,) = (tmp_path / ours.__name__).glob("fit-ops*.txt")
    assert all(f".{step}_step" in report.read_text() for step in ("training", "validation")), "it is of both"


RECORD, SAVE, WARMUP = ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE, ProfilerAction.WARMUP


@pytest.mark.parametrize(
    ("actions", "traces"),
    [(None, 2), ({3: RECORD, 4: RECORD}, 2), ({3: RECORD, 4: WARMUP, 5: RECORD, 6: SAVE}, 2)],
    ids=["torch's", "broken off", "warming up anew"],
)
def test_no_range_outlives_the_trace_that_it_began_in(tmp_path: Path, actions: Any, traces: int) -> None:
    """Its end would be written into memory that torch has freed: seen as a crash at the end of every second fit."""
    run_alone(_ranges_within_traces, tmp_path, actions, traces)


def _ranges_within_traces(tmp_path: Path, actions: dict[int, ProfilerAction] | None, traces: int) -> None:
    from drivetrain_plugins.profilers import pytorch

    ended = [0]  # traces
    outlived: list[str] = []
    began: dict[int, int] = {}
    seen: set[str] = set()

    class Watched(torch.autograd.profiler.record_function):
        def __enter__(self) -> Any:
            if torch.autograd._profiler_enabled():
                began[id(self)] = ended[0]
                seen.add(self.name)
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            if began.pop(id(self), ended[0]) != ended[0]:
                outlived.append(self.name)
            super().__exit__(*error)

    stop_trace = torch.profiler.profile.stop_trace

    def counted(profile: Any) -> None:
        stop_trace(profile)
        ended[0] += 1

    pytorch.record_function = Watched  # type: ignore[attr-defined,misc]
    torch.profiler.profile.stop_trace = counted  # type: ignore[method-assign]
    how = {} if actions is None else {"schedule": lambda step: actions.get(step, ProfilerAction.NONE)}
    profiler = ours.profilers.PyTorchProfiler(tmp_path, "ops", **how)
    fit = trainer(ours, tmp_path, profiler=profiler, num_sanity_val_steps=2, max_epochs=3)
    fit.fit(classifier(ours), loader(16), loader(8))
    assert ended[0] == traces, "a trace of each kind of step"
    assert "[pl][profile]run_training_epoch" in seen, "an epoch began while steps were recorded"
    assert not outlived and not began


def test_by_a_name_in_any_letters(tmp_path: Path) -> None:
    for name in "Simple", "ADVANCED":
        found = [type(trainer(library, tmp_path, profiler=name).profiler).__name__ for library in (theirs, ours)]
        assert found[0] == found[1]


def test_each_worker_writes_its_own_report(tmp_path: Path) -> None:
    profiler = ours.profilers.SimpleProfiler(tmp_path, "r")
    trainer(ours, tmp_path, profiler=profiler, strategy="ddp", devices=2, max_epochs=1).fit(classifier(ours), loader())
    assert sorted(f for f in os.listdir(tmp_path) if f.endswith(".txt")) == ["fit-r-0.txt", "fit-r-1.txt"]
