"""The launching process is told to stop, or dies: what its workers do then."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from drivetrain.errors import Interrupted
from drivetrain.launch import Job, launch, pending
from drivetrain.launch.temporary import remove_stale
from tests.launch import programs
from tests.patience import GONE, SOON


def _until_told(job: Job, payload: dict[str, Any]) -> None:
    """Run steps until the flag is there; save; end in the way of ``payload``."""
    folder = Path(payload["folder"])
    (folder / f"ready_{job.rank}").touch()
    while (signum := pending()) is None or payload["how"] == "deaf":
        time.sleep(0.05)
    time.sleep(0.3 * job.rank)  # ranks do not end at the same moment
    (folder / f"saved_{job.rank}").write_text(str(signum))
    if payload["how"] == "raise":
        raise Interrupted(signum)


def _program(folder: Path, how: str, grace: float, start_method: str = "auto") -> None:
    launch(_until_told, {"folder": str(folder), "how": how}, workers=2, grace=grace, start_method=start_method)


def _ready(folder: Path) -> None:
    programs.wait_for(folder / "ready_0", folder / "ready_1")


@pytest.mark.parametrize("how", ["raise", "return"])
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_workers_save_and_all_end(signum: signal.Signals, code: int, how: str, tmp_path: Path) -> None:
    with programs.forked(_program, tmp_path, how, SOON) as process:
        assert process.pid is not None
        _ready(tmp_path)
        workers = programs.descendants(process.pid)
        assert len(workers) == 2
        os.kill(process.pid, signum)
        process.join(SOON)
        assert process.exitcode == code
        assert programs.all_gone(workers, 0.0)
    assert {path.name: path.read_text() for path in tmp_path.glob("saved_*")} == {
        "saved_0": str(int(signum)),
        "saved_1": str(int(signum)),
    }


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_reaches_the_whole_group(signum: signal.Signals, code: int, start_method: str, tmp_path: Path) -> None:
    with programs.forked(_program, tmp_path, "raise", SOON, start_method) as process:
        assert process.pid is not None
        _ready(tmp_path)
        os.killpg(process.pid, signum)
        process.join(SOON)
        assert process.exitcode == code
    assert len(list(tmp_path.glob("saved_*"))) == 2


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_forkserver_that_ends_before_the_workers_start(
    signum: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with programs.forked(_program, tmp_path, "raise", SOON, "forkserver") as process:
        assert process.pid is not None
        deadline = time.monotonic() + SOON
        while not (found := _forkservers(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.001)
        if signum == signal.SIGTERM:  # to all, as a scheduler may: one that is just starting does not pass it over yet
            os.killpg(process.pid, signum)
        else:
            os.kill(found[0].pid, signum)
        process.join(SOON)
        assert process.exitcode == (143 if signum == signal.SIGTERM else 1)
    said = capfd.readouterr()
    assert said.err == "", "semaphores were let go of in time"
    assert ("the forkserver that starts the workers ended" in said.out) is (signum == signal.SIGKILL)


def _forkservers(pid: int) -> list[Any]:
    return [one for one in programs.descendants(pid) if "multiprocessing.forkserver" in " ".join(one.cmdline())]


def test_deaf_workers_have_their_grace_only(tmp_path: Path) -> None:
    with programs.forked(_program, tmp_path, "deaf", 1.0) as process:
        assert process.pid is not None
        _ready(tmp_path)
        workers = programs.descendants(process.pid)
        start = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        process.join(SOON)
        assert process.exitcode == 143
        assert 0.9 < time.monotonic() - start < SOON
        assert programs.all_gone(workers, 0.0)


def test_second_control_c_waits_for_nobody(tmp_path: Path) -> None:
    with programs.forked(_program, tmp_path, "deaf", 60.0) as process:
        assert process.pid is not None
        _ready(tmp_path)
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.3)
        assert process.is_alive()
        os.kill(process.pid, signal.SIGINT)
        process.join(SOON)
        assert process.exitcode == 130


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_workers_die_with_their_launcher(start_method: str, tmp_path: Path) -> None:
    with programs.forked(_program, tmp_path, "deaf", SOON, start_method) as process:
        assert process.pid is not None
        _ready(tmp_path)
        workers = programs.descendants(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        assert programs.all_gone(workers, GONE)
    remove_stale()  # a killed launcher cannot clear its folder; the next start does
