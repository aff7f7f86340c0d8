"""What a killed launcher left behind is removed by the next start; what is in use is not."""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest

from drivetrain.errors import ConfigurationError
from drivetrain.launch import Job, launch, temporary
from drivetrain.launch.temporary import OWNER, temporary_folder
from tests.faults.programs import Slow, train
from tests.launch.programs import all_gone, descendants, forked, wait_for
from tests.patience import GONE
from tests.runs import Classifier
from tests.runs import train as fit


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of the test's own, whose path leaves room for sockets as tmp_path may not."""
    with tempfile.TemporaryDirectory() as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        yield Path(made)
        monkeypatch.undo()


def wait_for_lock(path: Path) -> None:
    """Until nobody holds it: of a process that is seen to have ended, a thread may still be on its way out."""
    deadline = time.monotonic() + GONE
    with path.open("r+") as file:
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                assert time.monotonic() < deadline, f"{path} is still held"
                time.sleep(0.02)


def test_a_killed_launcher_is_cleared_after(tmp_path: Path, place: Path) -> None:
    with forked(train, tmp_path, "ddp", 2, Slow(tmp_path, "train", 1)) as process:
        assert process.pid is not None
        wait_for(tmp_path / "reached_0", tmp_path / "reached_1")
        below = descendants(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert all_gone(below, GONE)
    for folder in place.glob("drivetrain-*"):
        wait_for_lock(folder / OWNER)
    assert {path.name.split("-")[1] for path in place.glob("drivetrain-*")} == {"launch", "results"}
    fit(Classifier, "ddp", 2, max_epochs=1)
    assert not list(place.glob("drivetrain-*"))


def test_what_is_in_use_stays(place: Path) -> None:
    def hold(until: Path) -> None:
        with temporary_folder("held") as folder:
            (folder / "mine").touch()
            wait_for(until)

    stranger = place / "drivetrain-of-somebody"
    stranger.mkdir()
    with forked(hold, place / "enough") as process:
        wait_for(place)
        while not (held := list(place.glob("drivetrain-held-*/mine"))):
            assert process.is_alive()
        with temporary_folder("other") as folder:
            assert folder.is_dir() and held[0].exists()
        assert not folder.exists()
        (place / "enough").touch()
        process.join()
        assert process.exitcode == 0
    assert list(place.glob("drivetrain-*")) == [stranger]


def test_paths_that_are_too_long_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loader processes of workers make sockets in a temporary folder, as they can where TMPDIR is a long path."""
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(long))
    listened = launch(_listens, {}, workers=1)
    assert listened[0] < 104 and not list(long.iterdir())
    monkeypatch.setattr(temporary, "SHORT", tmp_path / "not_there")
    with pytest.raises(ConfigurationError, match=r"whose path is longer than 57 bytes, .* set TMPDIR to a shorter one"):
        launch(_listens, {}, workers=1)


def _listens(job: Job, payload: dict[str, Any]) -> int:
    with Listener(family="AF_UNIX") as listener:
        return len(os.fsencode(listener.address))
