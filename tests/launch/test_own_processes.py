"""What a worker has started ends with it at once, also where nobody is left to end it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from drivetrain.launch import Job, launch
from drivetrain.launch.temporary import remove_stale
from tests.launch import programs
from tests.patience import GONE, LIMIT


def _starts(job: Job, payload: dict[str, Any]) -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[LIMIT], daemon=True)
    child.start()
    Path(payload["folder"], f"ready_{job.rank}").write_text(str(child.pid))
    time.sleep(LIMIT)


def _program(folder: Path, start_method: str) -> None:
    launch(_starts, {"folder": str(folder)}, workers=2, start_method=start_method)


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_they_end_when_the_launcher_is_killed(start_method: str, tmp_path: Path) -> None:
    with programs.forked(_program, tmp_path, start_method) as process:
        assert process.pid is not None
        programs.wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
        all_of_them = programs.descendants(process.pid)
        assert len(all_of_them) >= 4
        os.kill(process.pid, signal.SIGKILL)
        assert programs.all_gone(all_of_them, GONE)
    remove_stale()


def _from_a_thread(job: Job, payload: dict[str, Any]) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[0.5], daemon=True)
    thread = threading.Thread(target=child.start)
    thread.start()
    thread.join()
    child.join()
    return child.exitcode


def test_they_outlive_the_thread_that_started_them() -> None:
    assert launch(_from_a_thread, {}, workers=1) == {0: 0}
