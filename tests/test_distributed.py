"""The fixtures that all other tests trust."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import distributed, leaks
from tests.distributed import RankError
from tests.patience import SOON


def test_ranks_compute_together(run_ranks: Callable[..., Any]) -> None:
    def add(rank: int, world_size: int, base: float) -> dict[str, Any]:
        x = torch.full((3,), base + rank)
        dist.all_reduce(x)
        return {"sum": x, "rank": rank, "of": world_size}

    values = run_ranks(add, 3, 10.0)
    assert [value["rank"] for value in values] == [0, 1, 2]
    assert all(torch.equal(value["sum"], torch.full((3,), 33.0)) for value in values)


def test_alone_has_no_group(run_alone: Callable[..., Any]) -> None:
    assert run_alone(lambda x: [x, dist.is_initialized(), os.getpid()], 5)[:2] == [5, False]


def test_first_failing_rank_is_named(run_ranks: Callable[..., Any]) -> None:
    def fail(rank: int, world_size: int) -> None:
        if rank == 1:
            raise ValueError("no such luck")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 failed:\n(.|\n)*ValueError: no such luck"):
        run_ranks(fail, 2)
    assert time.monotonic() - start < SOON


def test_killed_rank_is_named(run_ranks: Callable[..., Any]) -> None:
    def die(rank: int, world_size: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)

    with pytest.raises(RankError, match="rank 1 failed:\nit died with exit code -9"):
        run_ranks(die, 2)


def test_late_ranks_are_killed(run_ranks: Callable[..., Any]) -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] did not finish within 4.0 s"):
        run_ranks(lambda rank, world_size: time.sleep(30 * rank), 2, timeout=4.0)


def test_a_rank_may_leave_no_process(run_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "ENDS", 0.5)
    with pytest.raises(RankError, match="left a process behind"):
        run_ranks(lambda rank, world_size: subprocess.Popen(["sleep", "30"]).pid, 1)


def test_values_must_be_plain(run_alone: Callable[..., Any]) -> None:
    with pytest.raises(RankError, match="rank 0 failed"):
        run_alone(lambda: Path("x"))


def _process() -> Callable[[], Any]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    return lambda: (process.kill(), process.wait())


def _thread() -> Callable[[], Any]:
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    thread.start()
    return lambda: (event.set(), thread.join())


def _port() -> Callable[[], Any]:
    return socket.create_server(("127.0.0.1", 0)).close


def _variable() -> Callable[[], Any]:
    os.environ["LEFT"] = "1"
    return lambda: os.environ.pop("LEFT")


def _removed_variable() -> Callable[[], Any]:
    value = os.environ.pop("OMP_NUM_THREADS")
    return lambda: os.environ.__setitem__("OMP_NUM_THREADS", value)


def _handler() -> Callable[[], Any]:
    old = signal.signal(signal.SIGTERM, lambda *_: None)
    return lambda: signal.signal(signal.SIGTERM, old)


def _group() -> Callable[[], Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.destroy_process_group


def _file() -> Callable[[], Any]:
    path = Path(tempfile.mkdtemp(prefix="torchelastic_"))
    return path.rmdir


def _file_here() -> Callable[[], Any]:
    path = Path.cwd() / "left.txt"
    path.touch()
    return path.unlink


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (_process, "process: "),
        (_thread, "thread: "),
        (_port, "port: 127.0.0.1:"),
        (_variable, "variable: LEFT=1"),
        (_removed_variable, "variable: OMP_NUM_THREADS was removed"),
        (_handler, "handler: SIGTERM: "),
        (_group, "group: the default process group"),
        (_file, "file: "),
        (_file_here, "file: "),
    ],
)
def test_each_kind_of_leak_is_caught(make: Callable[[], Callable[[], Any]], kind: str) -> None:
    before = leaks.snapshot()
    clean = make()
    try:
        lines = leaks.left_behind(before, settle=0.0)
        assert any(line.startswith(kind) for line in lines)
    finally:
        clean()
    assert leaks.left_behind(before) == []


def test_a_leaking_test_fails(pytester: pytest.Pytester, repository: Path) -> None:
    pytester.makeconftest("from tests import leaks\nfrom tests.conftest import nothing_left_behind\nleaks.SETTLE = 0.1")
    pytester.makepyfile("import os\ndef test_leak(): os.environ['LEFT'] = '1'\ndef test_clean(): pass")
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(pytester.path)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "the test left behind: variable: LEFT=1" in done.stdout
    assert "2 passed, 1 error" in done.stdout


def test_a_loader_process_that_is_ended_leaves_no_folder_of_its_sockets(run_ranks: Callable[..., Any]) -> None:
    def loads(made: Any) -> None:
        made.send(get_temp_dir())
        time.sleep(60)

    def ends(rank: int, world_size: int) -> str:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=loads, args=(theirs,))
        process.start()
        folder = ours.recv()
        process.terminate()
        process.join()
        return str(folder)

    [folder] = run_ranks(ends, 1)
    assert not Path(folder).exists()
