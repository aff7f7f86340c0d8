"""The whole command with the real Trainer, on a module that takes no time."""

from __future__ import annotations

import csv
import inspect
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import drivetrain
from drivetrain import app, compare
from drivetrain.cli import worker
from drivetrain.cli.hints import in_plain_lines
from drivetrain.cli.options import TrainerOptions
from drivetrain.cli.request import Request
from drivetrain.errors import ConfigurationError, PossibleUserWarning
from drivetrain.trainer import Trainer
from tests.patience import LIMIT

QUIET = ["callbacks=none", "precision=64-true", "trainer.max_epochs=2", "trainer.log_every_n_steps=1"]


@pytest.fixture
def tiny(home: Path) -> list[str]:
    """Words that choose the tiny module and data from a user's own conf folder."""
    for group, name in (("model", "Tiny"), ("data", "Points")):
        (home / "own" / group).mkdir(parents=True)
        (home / "own" / group / "tiny.yaml").write_text(f"_target_: tests.app.tiny.{name}\n")
    return ["--config-dir", str(home / "own"), "recipe=none", "model=tiny", "data=tiny", *QUIET]


def run_of(folder: str) -> dict[str, Any]:
    """The record in ``folder``."""
    record = json.loads((Path(folder) / "run.json").read_text())
    assert isinstance(record, dict)
    return record


def test_two_workers_end_where_one_does(tiny: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert app.run([*tiny, "strategy=single", "hydra.run.dir=one"]) == 0
    assert app.run([*tiny, "strategy=ddp", "hydra.run.dir=two"]) == 0
    one, two = run_of("one"), run_of("two")
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert one["global_step"] == two["global_step"] == 6
    assert len(two["loss_curve"]) == 6
    assert {"train/loss", "val/loss", "test/loss"} <= set(two["metrics"])
    assert Path(two["checkpoints"]["last"]).exists()
    names = {path.name for path in Path("two").iterdir()}
    assert {".hydra", "run.json", "tensorboard", "checkpoints", "logs"} == names
    capfd.readouterr()
    assert compare.main(["one", "two", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert {difference["what"] for difference in told["differences"]} == {
        "optimizer steps",
        "loss curve",
        "metrics",
        "weights",
    }


def test_a_run_goes_on_predicts_and_says_what_it_cannot(tiny: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    alone = [*tiny, "strategy=single", "logger=none"]
    assert app.run([*alone, "task=fit", "trainer.max_epochs=1", "hydra.run.dir=part"]) == 0
    assert app.run([*alone, "task=fit", "resume=auto", "hydra.run.dir=part"]) == 0
    assert run_of("part")["global_step"] == 6
    assert app.run([*alone, "task=predict", "resume=best", "hydra.run.dir=part"]) == 0
    saved = torch.load("part/predictions.pt", weights_only=True)
    assert sum(len(batch) for batch in _tensors(saved)) == 11
    capfd.readouterr()
    assert app.run([*alone, "+model.widht=4", "hydra.run.dir=wrong"]) == 2
    assert "'width'" in capfd.readouterr().err
    assert run_of("wrong")["status"] == "failed"
    Path("part/run.json").unlink()
    last = Path("part/checkpoints/last.ckpt").resolve()
    (last / "state.pt").write_bytes(b"another content")
    for resume, said in (("best", "does not say which"), (f"'{last}'", "damaged: state.pt has 15 bytes")):
        assert app.run([*alone, f"resume={resume}", "hydra.run.dir=part"]) == 2
        told = capfd.readouterr().err
        assert said in told and told.count("\n") == 1
        assert not Path("part/run.json").exists()
    assert app.run([*alone, "resume=last", "hydra.run.dir=part"]) == 0  # from the one before it
    told = capfd.readouterr().err
    assert told.startswith("warning: the checkpoint ") and ".py:" not in told


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [tensor for item in items for tensor in _tensors(item)]


def test_the_schema_names_arguments_of_the_trainer() -> None:
    assert set(TrainerOptions.__dataclass_fields__) <= set(inspect.signature(Trainer).parameters)


def test_arguments_of_plugins_are_checked_in_the_parent(request_of: Callable[..., Request]) -> None:
    request = request_of(["strategy=single", "+callbacks.early_stopping={monitor: a, patiense: 3}"])
    with pytest.raises(ConfigurationError, match=r"patiense.*'patience'"):
        worker.preload(request.config)
    worker.preload(request_of(["strategy=ring"]).config)
    for word in ("checkpoint.every_n_epochs=often", "+callbacks.early_stopping={monitor: a, patience: [3]}"):
        with pytest.raises(
            ConfigurationError, match=r"^(checkpoint|callbacks\.early_stopping)\.\w+=.* must be a whole"
        ):
            worker.preload(request_of(["strategy=single", word]).config)


def test_parts_by_name_target_and_with_what_is_missing() -> None:
    timer = worker.part({"name": "timer", "duration": "00:00:00:05"}, "any", "callbacks")
    assert type(timer).__name__ == "Timer"
    own = worker.part({"_target_": "tests.app.tiny.Points"}, "any", "callbacks")
    assert type(own).__name__ == "Points"
    with pytest.raises(ConfigurationError, match="monitor"):
        worker.part({}, "early_stopping", "callbacks")
    with pytest.raises(ConfigurationError, match="cannot be imported"):
        worker.build({"_target_": "tests.app.tiny.Nothing"}, "model")
    wide = {"_target_": "tests.app.tiny.Tiny", "width": "wide"}
    with pytest.raises(ConfigurationError, match=r"^model\.width=wide must be a whole number$"):
        worker._made(wide, "model", {"optimizer": torch.optim.SGD})
    worker._made({**wide, "width": 2}, "model", {"optimizer": torch.optim.SGD})


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("optimizer.lr=fast", "lr must be a number"),
        ("optimizer.lr=-1", "Invalid learning rate: -1"),
        ("optimizer.nesterov=perhaps", "nesterov must be true or false"),
        ("optimizer.lr=inf", "lr must be finite"),
        ("optimizer=adamw optimizer.betas=[0.9]", "betas must be a list of 2"),
        ("optimizer=adamw optimizer.betas=0.9", "betas must be a list of 2"),
    ],
)
def test_what_an_optimizer_refuses_is_one_sentence(
    tiny: list[str], word: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert app.run([*tiny, "strategy=ddp", "optimizer=sgd", *word.split(), "hydra.run.dir=refused"]) == 2
    told = capfd.readouterr().err
    assert told.startswith("error: optimizer (") and word.rpartition("optimizer.")[2] in told
    assert reason in told
    assert "Traceback" not in told
    assert run_of("refused")["status"] == "failed"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("strategy=gossip optimizer=lbfgs", "strategy=gossip cannot run an optimizer that evaluates its closure"),
        ("strategy=ddp precision.loss_scale=3", "does not scale losses"),
    ],
)
def test_classes_that_do_not_go_together_are_known_before_there_are_workers(
    tiny: list[str], words: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert app.run([*tiny, *words.split(), "devices=2", "hydra.run.dir=refused"]) == 2
    told = capfd.readouterr().err
    assert told.startswith("error: ") and said in told and told.count("\n") == 1
    assert run_of("refused")["status"] == "failed" and not Path("refused/logs").exists()


def test_what_lbfgs_refuses_is_known_before_the_first_step() -> None:
    with pytest.raises(ConfigurationError, match=r"optimizer \(.*line_search_fn=foo.*only 'strong_wolfe' is supported"):
        worker._Part.of(partial(torch.optim.LBFGS, line_search_fn="foo"), "optimizer")([torch.zeros(1)])
    worker._Part.of(partial(torch.optim.LBFGS, line_search_fn="strong_wolfe"), "optimizer")([torch.zeros(1)])


def test_what_a_scheduler_refuses_is_known_before_the_first_epoch(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scheduled = ["strategy=single", "logger=none", "callbacks=none", "hydra.run.dir=refused"]
    for word in ("scheduler=cosine scheduler.T_max=zero", "scheduler=cosine scheduler.T_max=0", "scheduler=step"):
        words = [*word.split(), *(["scheduler.step_size=0"] if word == "scheduler=step" else [])]
        assert app.run([*scheduled, *words]) == 2
        told = capfd.readouterr().err
        assert told.startswith("error: scheduler (")
        assert "is refused" in told
        assert "Traceback" not in told
        assert run_of("refused")["global_step"] == 0


def test_no_checkpoints_beside_a_recipe_that_says_what_to_monitor(tiny: list[str]) -> None:
    words = [*tiny, "strategy=single", "logger=none", "checkpoint=none", "+checkpoint.monitor=val/loss"]
    assert app.run([*words, "hydra.run.dir=without"]) == 0
    assert run_of("without")["checkpoints"] == {"best": None, "last": None}
    assert not Path("without/checkpoints").exists()


@pytest.mark.parametrize("name", ["cosine", "one_cycle", "chained"])
def test_trying_a_scheduler_leaves_no_trace(name: str) -> None:
    schedulers = torch.optim.lr_scheduler

    def chained(optimizer: torch.optim.Optimizer) -> Any:
        return schedulers.SequentialLR(
            optimizer, [schedulers.LinearLR(optimizer, 0.1), schedulers.ExponentialLR(optimizer, 0.9)], milestones=[1]
        )

    make: dict[str, Callable[[Any], Any]] = {
        "cosine": partial(schedulers.CosineAnnealingLR, T_max=5),
        "one_cycle": partial(schedulers.OneCycleLR, max_lr=0.5, total_steps=7),
        "chained": partial(chained),
    }
    rates = []
    for part in (make[name], worker._Part.of(make[name], "scheduler")):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2, momentum=0.9)
        scheduler = part(optimizer)
        rates.append([])
        for _ in range(6):
            group = optimizer.param_groups[0]
            rates[-1].append((group["lr"], group["momentum"], scheduler.last_epoch))
            optimizer.step()
            scheduler.step()
    assert rates[0] == rates[1]


def test_monitors_write_where_time_and_traffic_go(tiny: list[str]) -> None:
    assert app.run([*tiny, "strategy=ring", "callbacks=profile", "logger=csv", "hydra.run.dir=ring"]) == 0
    told = run_of("ring")["communication"]
    ring, phases = told["operations"]["ring"], told["phases"]
    steps = run_of("ring")["global_step"]
    assert ring["calls"] >= steps and ring["bytes_sent"] > 0
    assert ring["algorithm_bandwidth"] == pytest.approx(ring["bus_bandwidth"])  # 2 (N - 1) / N is one for two ranks
    assert phases["backward"]["ring"]["calls"] == ring["calls"]
    assert {"boundary", "evaluation", "checkpoint"} <= set(phases)
    counted = sum(row["bytes_sent"] for rows in phases.values() for row in rows.values())
    assert 0 < counted <= told["bytes_sent"]

    (table,) = Path("ring").rglob("metrics.csv")
    with table.open(newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    perf = [row for row in rows if "perf/step" in row]
    comm = [row for row in rows if "comm/bytes_per_step" in row]
    assert len(perf) == len(comm) == steps
    for row in perf:
        parts = [value for name, value in row.items() if name.startswith("perf/")]
        assert min(parts) >= 0 and row["perf/communication_exposed"] > 0
        spent = [row[f"perf/{part}"] for part in ("data", "forward", "backward", "optimizer", "checkpoint", "other")]
        assert sum(spent) + row["perf/communication"] >= row["perf/step"] * 0.999
    assert sum(row["perf/checkpoint"] for row in perf) > 0
    sent = sum(row["comm/bytes_per_step"] for row in comm)
    backward = sum(row["comm/backward/bytes_per_step"] for row in comm)
    assert 0 < backward == ring["bytes_sent"] <= sent
    assert all(row["comm/ring/bus_bandwidth"] > 0 for row in comm)


@pytest.mark.parametrize("error", ["read", "also"])
@pytest.mark.parametrize("shown", ["a full device", "nobody reads"])
def test_a_terminal_that_takes_nothing_ends_no_run(shown: str, error: str, tiny: list[str], tmp_path: Path) -> None:
    words = [word for word in tiny if word != "callbacks=none"]
    words = [sys.executable, "-m", "drivetrain", "train", *words, "strategy=ddp", "devices=2", "hydra.run.dir=here"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, open(writer, "w") as unread:
        output = full if shown == "a full device" else unread
        done = subprocess.run(
            words,
            stdout=output,
            stderr=subprocess.PIPE if error == "read" else output,
            text=True,
            env=environment,
            timeout=LIMIT,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    if error == "read":
        assert "the table cannot be shown" in done.stderr and "here" in done.stderr
    assert json.loads(Path("here/run.json").read_text())["status"] == "completed"
    assert "the terminal cannot be written any more" in Path("here/logs/rank_0.log").read_text()


def test_an_error_that_nobody_can_be_told_has_its_exit_code() -> None:
    words = [sys.executable, "-m", "drivetrain", "train", "strategy=nonsense"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    codes = []
    for name in (os.devnull, "/dev/full"):
        with open(name, "w") as output:
            done = subprocess.run(words, stdout=output, stderr=output, env=environment, timeout=LIMIT, check=False)
        codes.append(done.returncode)
    assert codes[0] == codes[1] == ConfigurationError.exit_code


def test_a_hint_is_one_line_and_not_repeated_in_a_sweep(
    tiny: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*tiny, "strategy=ddp", "devices=2", "trainer.log_every_n_steps=99", "seed=1,2"]
    assert app.run(["-m", *words, f"hydra.sweep.dir={tmp_path}/both"]) == 0
    said = [line for line in capfd.readouterr().err.splitlines() if "log_every_n_steps" in line and "#" not in line]
    assert len(said) == 1 and said[0].startswith("warning: log_every_n_steps=99 is more than the 3 batches")
    assert not any("hints" in json.loads(file.read_text()) for file in tmp_path.glob("both/*/run.json"))


def test_a_warning_of_a_project_keeps_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(record=True) as as_python_shows_it, in_plain_lines(["told before"]) as hints:
        warnings.simplefilter("always")
        for text in ("told before", "new", "new"):
            warnings.warn_explicit(text, PossibleUserWarning, drivetrain.__file__, 1)
        warnings.warn_explicit("meant", UserWarning, drivetrain.__file__, 2)
        warnings.warn_explicit("its own", UserWarning, "project.py", 7)
    assert hints == ["new"]
    assert capsys.readouterr().err.splitlines() == ["warning: new", "warning: meant"]
    assert [(str(found.message), found.filename, found.lineno) for found in as_python_shows_it] == [
        ("its own", "project.py", 7)
    ]


@pytest.mark.parametrize("words", [[], ["-m", "seed=1,2"]], ids=["run", "sweep"])
@pytest.mark.parametrize("where", ["drivetrain.cli.look.refuse_module", "drivetrain.launch.launch"])
def test_ctrl_c_before_there_are_workers(
    where: str, words: list[str], tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's own handler is there until the launcher waits for workers."""

    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    folder = "sweep/0" if words else "run"
    assert app.run([*tiny, *words, "strategy=ddp", "devices=2", "hydra.run.dir=run", "hydra.sweep.dir=sweep"]) == 130
    assert capsys.readouterr().err.strip().splitlines()[-1] == "error: stopped by signal 2"
    record = run_of(folder)
    assert (record["status"], record["error"]) == ("interrupted", "stopped by signal 2")
    assert not Path("sweep/1").exists()


def test_ctrl_c_while_the_request_is_read(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "check", interrupted)
    assert app.run([*tiny, "hydra.run.dir=run"]) == 130
    assert capsys.readouterr().err.strip() == "error: stopped by signal 2"
    assert not Path("run").exists()
