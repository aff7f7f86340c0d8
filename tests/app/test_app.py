from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain import app
from drivetrain.folders import held
from tests import distributed
from tests.patience import LIMIT, SOON
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("no_training")


def records(folder: Path) -> list[dict[str, Any]]:
    """All run records below ``folder``, in the order of their paths."""
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("run.json"))]


def test_a_run_is_one_folder_with_its_record(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert app.run(["strategy=mine", "seed=7"]) == 0
    (file,) = home.rglob("run.json")
    assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", str(file.parent.relative_to(home)))
    assert {path.name for path in file.parent.iterdir()} == {".hydra", "logs", "run.json"}
    assert {"rank_0.log", "rank_1.log"} <= {path.name for path in (file.parent / "logs").iterdir()}
    assert yaml.safe_load((file.parent / ".hydra" / "overrides.yaml").read_text()) == ["strategy=mine", "seed=7"]
    (run,) = records(home)
    assert run["status"] == "completed" and run["error"] is None
    assert (run["strategy"], run["world_size"], run["devices"], run["recipe"]) == ("mine", 2, 2, "mnist")
    assert run["metrics"] == {"val/loss": 7.0}
    assert run["folder"] == str(file.parent)
    assert set(run) >= {"throughput", "seconds", "communication", "checkpoints", "versions", "weights_digest"}
    out = capfd.readouterr().out
    assert "val/loss" in out and "outputs/" in out


def test_two_runs_in_one_folder_are_refused(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever is forked while a run holds its folder has no part in that: what is left of it keeps nobody out."""
    words = ["strategy=mine", "devices=1", "hydra.run.dir=here"]
    (home / "here").mkdir()
    with held(Path("here")):
        child = os.fork()
        if child == 0:
            time.sleep(LIMIT)
            os._exit(0)
        assert app.run(words) == 2
        assert app.run(["-m", *words[:2], "hydra.sweep.dir=.", "hydra.sweep.subdir=here"]) == 1
        assert not (home / "here" / "run.json").exists()
    said = capfd.readouterr().err
    assert said.startswith("error: another run is at work in ")
    assert app.run(words) == 0
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_folder_with_an_earlier_run_is_told_of(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["strategy=mine", "devices=1", "hydra.run.dir=here"]
    said = []
    assert app.run(words) == 0
    assert app.run(words) == 0
    assert "earlier run" not in capfd.readouterr().err  # it left neither curves nor checkpoints
    (home / "here" / "checkpoints" / "last.ckpt").mkdir(parents=True)
    for more in ([], ["resume=auto"], ["task=test"]):
        assert app.run([*words, *more]) == 0
        said.append("here holds an earlier run, whose curves and checkpoints stay there" in capfd.readouterr().err)
    assert said == [True, False, False]


def test_a_failing_worker_is_named_first_and_recorded(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert app.run(["strategy=mine", "devices=3", "seed=13", "hydra.run.dir=here, 'it' = ${seed}"]) == 2
    assert app.run(["strategy=mine", "devices=3", "seed=13", "hydra.run.dir=here/it"]) == 1
    said = capfd.readouterr().err
    # Nothing but our own sentences, and the worker's traceback.
    assert said.splitlines()[1] == "error: rank 2 failed: ValueError: thirteen is unlucky"
    assert "overrides" not in said.splitlines()[1]
    (run,) = records(home)
    assert run["status"] == "failed"
    assert run["error"] == "rank 2 failed: ValueError: thirteen is unlucky"
    assert run["seconds"]["total"] > 0


def test_a_folder_of_any_name(home: Path) -> None:
    assert app.run(["strategy=mine", "devices=1", "hydra.run.dir='a, b=\\'c\\'/${seed}'"]) == 0
    assert (home / "a, b='c'" / "1" / "run.json").exists()


def test_a_sweep_goes_on_after_a_failing_job(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert app.run(["-m", "strategy=mine,picky", "seed=13,2", "devices=2"]) == 1
    (sweep,) = home.glob("multirun/*/*")
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "2", "3", "multirun.yaml"]
    assert [run["status"] for run in records(sweep)] == ["failed", "completed", "failed", "completed"]
    assert [run["strategy"] for run in records(sweep)] == ["mine", "mine", "picky", "picky"]
    out = capfd.readouterr().out
    assert "4 jobs" in out
    assert "strategy=picky seed=2" in re.sub(r"\s+", " ", out)


def test_a_refused_job_of_a_sweep_is_marked(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert app.run(["-m", "strategy=mine,picky", "devices=1"]) == 1
    said = capfd.readouterr()
    assert "at least 2 workers" in said.err
    assert "completed" in said.out and "failed" in said.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer=sgd,adam", "optimizer.momentm=0.9"], "'optimizer.momentm' with optimizer=sgd: did you mean "),
        (["optimizer=sgd,adam", "optimizer.momentum=0.9"], "'optimizer.momentum' with optimizer=adam: known: "),
        (["strategy=zero,tree", "strategy.stage=1"], "'strategy.stage' with strategy=tree: known: bucket_cap_mb, "),
        (["recipe=char_lm", "seed=1,2", "model.widht=3"], "'model.widht': did you mean 'width'"),
        (["recipe=char_lm", "optimizer.lr=interval(0,1)", "model.widht=3"], "'model.widht': did you mean 'width'"),
    ],
)
def test_an_option_that_a_sweep_lacks_is_told_of_the_job_that_lacks_it(
    home: Path, capfd: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert app.run(["-m", *words]) == 2
    assert f"there is no option {said}" in capfd.readouterr().err
    assert not list(home.iterdir())


def test_a_good_sweep_ends_with_0(home: Path) -> None:
    assert app.run(["-m", "strategy=mine", "seed=2,3", "devices=1"]) == 0
    assert [run["seed"] for run in records(home)] == [2, 3]


def test_a_signal_ends_a_sweep(home: Path) -> None:
    assert app.run(["-m", "strategy=mine", "seed=14,2", "devices=1"]) == 143
    (run,) = records(home)
    assert run["status"] == "interrupted"


def test_arguments_and_environment_are_given_back(home: Path) -> None:
    import sys

    argv, environ = list(sys.argv), dict(os.environ)
    app.run(["strategy=mine", "devices=1"])
    app.run(["strategy=nothing"])
    assert (sys.argv, dict(os.environ)) == (argv, environ)


def test_ranks_that_another_launcher_started_share_one_folder(home: Path) -> None:
    codes = distributed.run_alone(_join, str(home))
    assert codes == [0, 0, 0]
    (run,) = records(home)
    (folder,) = home.glob("outputs/*/*")
    assert run["world_size"] == 3 and run["folder"] == str(folder)
    assert len(list(home.rglob(".hydra"))) == 1
    assert {path.name for path in (folder / "logs").iterdir()} == {"rank_0.log", "rank_1.log", "rank_2.log"}


def test_a_joined_rank_that_fails_ends_with_1_and_nobody_waits_for_it(home: Path) -> None:
    began = time.monotonic()
    assert distributed.run_alone(_join, str(home), "seed=13") == [0, 0, 1]
    assert time.monotonic() - began < SOON


def test_joined_ranks_hear_of_a_folder_that_cannot_be_written(home: Path) -> None:
    assert distributed.run_alone(_join, str(home), "hydra.run.dir=/proc/nothing") == [2, 2, 2]


def test_several_nodes_share_the_first_ones_folder(home: Path) -> None:
    assert distributed.run_alone(_two_nodes, str(home)) == [0, 0]
    (run,) = records(home)
    assert run["folder"] == str(home / "0" / "run") and run["world_size"] == 2
    assert (home / "0" / "run" / ".hydra").is_dir() and not (home / "1" / "run" / ".hydra").exists()
    assert (home / "1" / "run" / "logs" / "rank_1.log").read_text().strip() == str(home / "0" / "run")


def test_a_sweep_of_joined_ranks_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in _environment(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    assert app.run(["-m", "seed=1,2"]) == 2
    assert "run it without torchrun" in capsys.readouterr().err
    assert list(home.iterdir()) == []


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return {**{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _join(home: str, *more: str) -> list[int]:
    """Three processes with the environment of a launcher that hosts no store; their exit codes."""
    port = free_port()
    words = ["strategy=mine", "accelerator=cpu", *more]
    return _side_by_side([(home, words, _environment(rank, 3, port)) for rank in range(3)])


def _two_nodes(home: str) -> list[int]:
    """Two commands, as on two nodes, each in its own folder; their exit codes."""
    common = ["strategy=mine", "devices=1", "num_nodes=2", f"master_port={free_port()}", "hydra.run.dir=run"]
    folders = [os.path.join(home, str(node)) for node in range(2)]
    for folder in folders:
        os.mkdir(folder)
    return _side_by_side([(folder, [*common, f"node_rank={node}"], {}) for node, folder in enumerate(folders)])


def _side_by_side(commands: list[tuple[str, list[str], dict[str, str]]]) -> list[int]:
    def command(folder: str, words: list[str], environment: dict[str, str]) -> None:
        os.chdir(folder)
        os.environ.update(environment)
        raise SystemExit(app.run(words))

    children = [multiprocessing.get_context("fork").Process(target=command, args=one) for one in commands]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return [int(child.exitcode or 0) for child in children]
