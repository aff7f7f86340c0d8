"""Workers of one node, launched from this process: their values, and every way in which they fail."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.errors import ConfigurationError, TrainingError, WorkerError
from drivetrain.launch import Job, current_job, destroy_process_group, init_process_group, job_store, launch, pending
from drivetrain.launch.agent import Agent
from drivetrain.launch.start_method import choose, why_not_fork
from tests.launch import programs
from tests.patience import GONE, LIMIT, SOON


def add(job: Job, payload: dict[str, Any]) -> dict[str, Any]:
    init_process_group(job)
    value = torch.tensor([float(job.rank + payload["base"])])
    if job.world_size > 1:  # one worker has no group
        dist.all_reduce(value)
        job_store().set(f"seen_{job.rank}", "1")
    destroy_process_group()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    return {
        "sum": value.item(), "job": job.as_dict(), "set": current_job() == job, "left": dist.is_initialized(),
        "environment": [os.environ[name] for name in names], "port": os.environ["MASTER_PORT"] == str(job.master_port),
    }  # fmt: skip


def test_values_of_all_ranks() -> None:
    values = launch(add, {"base": 1}, workers=3)
    assert list(values) == [0, 1, 2]
    for rank, value in values.items():
        assert value["sum"] == 6.0
        assert (value["set"], value["left"], value["port"]) == (True, False, True)
        assert value["environment"] == [str(rank), "3", str(rank), "127.0.0.1"]
        expected = {"rank": rank, "world_size": 3, "local_rank": rank, "local_world_size": 3, "origin": "local"}
        assert expected.items() <= value["job"].items()


def test_target_by_name_and_one_worker() -> None:
    values = launch("tests.launch.test_local:add", {"base": 5}, workers=1)
    assert values[0]["sum"] == 5.0


def test_large_values_need_no_shared_memory() -> None:
    values = launch(lambda job, payload: torch.full((300_000,), job.rank), {}, workers=2)
    assert torch.equal(values[1], torch.full((300_000,), 1))


def test_ten_starts_in_a_row() -> None:
    for number in range(10):
        assert launch(add, {"base": number}, workers=2)[1]["sum"] == 2 * number + 1


def test_three_at_once() -> None:
    def add_many(base: int) -> None:
        for _ in range(3):
            assert launch(add, {"base": base}, workers=2)[0]["sum"] == 2 * base + 1

    with (
        programs.forked(add_many, 1) as one,
        programs.forked(add_many, 2) as two,
        programs.forked(add_many, 3) as three,
    ):
        for process in (one, two, three):
            process.join(LIMIT)
            assert process.exitcode == 0


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    values = launch(lambda job, payload: torch.get_num_threads(), {}, workers=2)
    assert values[0] == 1  # OMP_NUM_THREADS rules
    monkeypatch.delenv("OMP_NUM_THREADS")
    values = launch(lambda job, payload: torch.get_num_threads(), {}, workers=1)
    assert values[0] == len(os.sched_getaffinity(0))


def _fail(job: Job, payload: dict[str, Any]) -> None:
    """Rank 1 fails in the way of ``payload``, the others wait for it in a collective or asleep."""
    init_process_group(job)
    dist.barrier()
    if job.rank == 1:
        how = payload["how"]
        if how == "raise":
            raise ValueError("no such luck\nsecond line")
        if how == "exit":
            sys.exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "training":
            raise TrainingError("loss is NaN at step 3")
        if how == "configuration":
            raise ConfigurationError("batch_size=0 trains nothing: use 1 or more")
    if payload["others"] == "collective":
        dist.all_reduce(torch.ones(1))
    while payload["others"] == "asleep":
        time.sleep(0.1)


@pytest.mark.parametrize("others", ["collective", "asleep"])
@pytest.mark.parametrize(
    ("how", "first_line"),
    [
        ("raise", "rank 1 failed: ValueError: no such luck"),
        ("exit", "rank 1 failed: exited with code 3"),
        ("kill", "rank 1 failed: killed by SIGKILL"),
    ],
)
def test_failing_rank_ends_all_and_is_named(how: str, first_line: str, others: str) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        launch(_fail, {"how": how, "others": others}, workers=3)
    assert time.monotonic() - start < SOON
    assert caught.value.rank == 1
    lines = str(caught.value).splitlines()
    assert lines[0] == first_line
    if how == "raise":
        assert lines[1] == "Traceback (most recent call last):"
        assert lines[-2:] == ["ValueError: no such luck", "second line"]
        assert "_fail" in caught.value.cause
    assert caught.value.exit_code == {"raise": 1, "exit": 3, "kill": 137}[how]


def _die_when_looked_at(job: Job, payload: dict[str, Any]) -> None:
    """Rank 1 is killed once the file of ``payload`` is there, the others sleep."""
    while job.rank != 1 or not Path(payload["looked"]).exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_ends_between_two_looks_ends_all_as_soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    look, looked = Agent._failures, tmp_path / "looked"

    def late(agent: Agent) -> list[Any]:
        found = look(agent)
        if not found and not looked.exists():  # what ends from here on, torch would see first
            looked.touch()
            deadline = time.monotonic() + LIMIT
            while all(one.exitcode is None for one in agent._processes().values()) and time.monotonic() < deadline:
                time.sleep(0.01)
        return found

    monkeypatch.setattr(Agent, "_failures", late)
    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 failed: killed by SIGKILL") as caught:
        launch(_die_when_looked_at, {"looked": str(looked)}, workers=3)
    assert time.monotonic() - start < SOON
    assert looked.exists() and caught.value.exit_code == 137


def test_errors_on_purpose_stay_what_they_are() -> None:
    with pytest.raises(ConfigurationError) as caught:
        launch(_fail, {"how": "configuration", "others": "collective"}, workers=2)
    assert str(caught.value) == "batch_size=0 trains nothing: use 1 or more"
    with pytest.raises(WorkerError) as worker:
        launch(_fail, {"how": "training", "others": "collective"}, workers=2)
    assert str(worker.value) == "rank 1 failed: TrainingError: loss is NaN at step 3"


def test_slow_cause_beats_its_quick_echo() -> None:
    def unwind(job: Job, payload: dict[str, Any]) -> None:
        init_process_group(job)
        dist.barrier()
        if job.rank == 1:
            try:
                raise ValueError("the cause")
            finally:
                destroy_process_group(failed=True)  # the other rank's collective fails now
                time.sleep(0.8)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(WorkerError, match="rank 1 failed: ValueError: the cause"):
        launch(unwind, {}, workers=2)


def test_stubborn_worker_is_killed() -> None:
    def stubborn(job: Job, payload: dict[str, Any]) -> None:
        if job.rank == 1:
            raise ValueError("over")
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        while True:
            time.sleep(1)

    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 failed: ValueError: over"):
        launch(stubborn, {}, workers=2)
    assert 2.5 < time.monotonic() - start < SOON


def test_processes_of_a_killed_worker_end_too(tmp_path: Path) -> None:
    def parent(job: Job, payload: dict[str, Any]) -> None:
        child = subprocess.Popen(["sleep", "60"])
        (tmp_path / "child").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        launch(parent, {}, workers=1)
    state = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    deadline = time.monotonic() + GONE
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_processes_of_a_killed_worker_keep_its_end_from_nobody(tmp_path: Path) -> None:
    """A loader's process holds its connections as well: the others hear of it at once, and need not be killed."""

    def work(job: Job, payload: dict[str, Any]) -> None:
        init_process_group(job)
        dist.barrier()
        if job.rank == 1:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError:
            (tmp_path / "heard").touch()
            raise

    with pytest.raises(WorkerError, match="rank 1 failed: killed by SIGKILL"):
        launch(work, {}, workers=2)
    assert (tmp_path / "heard").exists()


def test_worker_that_is_told_to_stop_sees_the_flag() -> None:
    def wait(job: Job, payload: dict[str, Any]) -> None:
        if job.rank == 1:
            raise ValueError("over")
        while pending() is None:
            time.sleep(0.01)
        Path(payload["seen"]).write_text(str(pending()))

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "seen"
        start = time.monotonic()
        with pytest.raises(WorkerError, match="over"):
            launch(wait, {"seen": str(seen)}, workers=2)
        assert time.monotonic() - start < SOON
        assert seen.read_text() == str(int(signal.SIGTERM))


def test_restarts_find_each_other_again(tmp_path: Path) -> None:
    def fail_twice(job: Job, payload: dict[str, Any]) -> list[float]:
        init_process_group(job)
        value = torch.ones(1)
        dist.all_reduce(value)
        if job.attempt < 2 and job.rank == 1:
            raise ValueError(f"attempt {job.attempt}")
        dist.all_reduce(value)
        destroy_process_group()
        return [job.attempt, value.item()]

    assert launch(fail_twice, {}, workers=2, max_restarts=2) == {0: [2, 4.0], 1: [2, 4.0]}
    with pytest.raises(WorkerError, match="attempt 1"):
        launch(fail_twice, {}, workers=2, max_restarts=1)


def test_one_log_for_each_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def speak(job: Job, payload: dict[str, Any]) -> None:
        print(f"\x1b[1mout {job.rank}\x1b[0m")
        print(f"err {job.rank}", file=sys.stderr)
        if job.rank == 1:
            os.system("echo native")
            raise ValueError("said")

    with pytest.raises(WorkerError, match="said"):
        launch(speak, {}, workers=2, log_dir=tmp_path / "logs")
    terminal = capfd.readouterr()
    assert (terminal.out, terminal.err) == ("\x1b[1mout 0\x1b[0m\n", "err 0\n")
    assert (tmp_path / "logs" / "rank_0.log").read_text() == "out 0\nerr 0\n"
    other = (tmp_path / "logs" / "rank_1.log").read_text()
    assert other.startswith("\x1b[1mout 1\x1b[0m\nerr 1\nnative\n")
    assert "ValueError: said" in other


def test_the_agents_log_has_its_messages_and_none_of_a_fault_that_is_none(tmp_path: Path) -> None:
    values = launch(add, {"base": 1}, workers=2, log_dir=tmp_path)
    assert values[0]["sum"] == 3.0
    said = (tmp_path / "launcher.log").read_text()
    assert "SUCCEEDED" in said and "Traceback" not in said and "WARNING" not in said


def test_torch_says_nothing_and_its_compiler_stays_out(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.launch.test_local import *; from tests.launch.test_local import _fail\n"
        "try: launch(_fail, {'how': 'raise', 'others': 'collective'}, workers=2)\n"
        "except WorkerError as error: print(error.rank, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1 False\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"workers": 0}, "workers=0"),
        ({"workers": 1, "num_nodes": 2, "node_rank": 2, "master_port": 1}, "node_rank=2"),
        ({"workers": 1, "num_nodes": 2}, "2 nodes need a master_port"),
        ({"workers": 1, "master_port": 70000}, "master_port=70000"),
        ({"workers": 1, "start_method": "spawn"}, "start_method='spawn'"),
        ({"workers": 1, "log_dir": Path("/proc/logs")}, "log_dir='/proc/logs'"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        launch(add, {"base": 0}, **arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_target_and_value_are_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match=r"target 'no\.such:thing'"):
        launch("no.such:thing", {}, workers=1)
    with pytest.raises(ConfigurationError, match="plain data only"):
        launch(lambda job, payload: lambda: None, {}, workers=1)


def test_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} is taken"):
            launch(add, {"base": 0}, workers=1, master_port=port)


def test_forkserver_runs_what_has_names_of_modules_of_torch() -> None:
    """``torch.classes`` and ``torch.ops`` are modules that pickle cannot write; a script's attributes are called so."""
    held = SimpleNamespace(classes=2.0, ops=3.0)
    values = launch(
        lambda job, payload: torch.tensor(held.classes + held.ops).item(), {}, workers=1, start_method="forkserver"
    )
    assert values == {0: 5.0}


def test_forkserver_keeps_the_names_of_classes() -> None:
    class Held:
        class Inner:
            pass

    def work(job: Job, payload: dict[str, Any]) -> Any:
        return [payload["held"].__qualname__, type(payload["inner"]).__qualname__, payload["held"].__module__]

    values = launch(work, {"held": Held, "inner": Held.Inner()}, workers=1, start_method="forkserver")
    assert values == {0: [Held.__qualname__, Held.Inner.__qualname__, __name__]}


def test_forkserver_runs_closures_and_leaves_nothing() -> None:
    base = 40

    def work(job: Job, payload: dict[str, Any]) -> Any:
        return [base + job.rank + payload["more"], multiprocessing.get_start_method()]

    values = launch(work, {"more": 1}, workers=2, start_method="forkserver")
    # A worker's own processes (of data loaders) start as they would in the launcher.
    usual = multiprocessing.get_context().get_start_method()
    assert values == {0: [41, usual], 1: [42, usual]}


def test_forkserver_needs_what_can_be_pickled() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigurationError, match=r"cannot be pickled \(TypeError"):
        launch(lambda job, payload: lock, {}, workers=1, start_method="forkserver")


def test_start_method_follows_the_threads() -> None:
    assert why_not_fork() is None
    assert choose("auto") == "fork"
    event = threading.Event()
    thread = threading.Thread(target=event.wait, name="busy")
    thread.start()
    try:
        assert choose("auto") == "forkserver"
        with pytest.raises(ConfigurationError, match=r"other Python threads \(busy\)"):
            choose("fork")
    finally:
        event.set()
        thread.join()


def test_a_process_that_was_forked_without_pythons_help_can_be_forked_from() -> None:
    """As by a daemon, or a server that forks for each request."""
    pid = os.fork()
    if pid == 0:
        os._exit(int(why_not_fork() is not None))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _passed_over(job: Job, payload: dict[str, Any]) -> int:
    return gc.get_freeze_count()


def test_a_workers_garbage_collections_pass_over_what_it_inherited() -> None:
    [passed_over] = launch(_passed_over, {}, workers=1).values()
    assert passed_over > gc.get_freeze_count() + 0.9 * len(gc.get_objects())


def test_what_the_trainer_imports_is_imported_once_for_all_workers_of_a_forkserver() -> None:
    names = ["torch._dynamo", "drivetrain.trainer"]
    __import__("drivetrain.trainer")  # as where a Trainer launches
    found = launch("tests.launch.programs:loaded", {"names": names}, workers=1, start_method="forkserver")
    assert found == {0: names}
