"""Run a launching program as a process of its own, so that it may be killed, or have computed with threads."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from drivetrain.errors import DrivetrainError
from tests.patience import LIMIT


@contextmanager
def forked(program: Callable[..., Any], *arguments: Any) -> Iterator[BaseProcess]:
    """``program(*arguments)`` in a fork of this process, leader of its own group; it exits as a command of ours would.
    Killed with all its descendants at the end."""

    def main() -> None:
        os.setsid()
        try:
            program(*arguments)
        except DrivetrainError as error:
            print(error, flush=True)
            sys.exit(error.exit_code)

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    assert process.pid is not None
    try:
        yield process
    finally:
        for one in descendants(process.pid):
            one.kill()
        process.kill()
        process.join()
        process.close()


def run(text: str, folder: Path, *launcher: str, timeout: float = LIMIT, **changes: str | None) -> tuple[int, str, str]:
    """Run the program ``text`` with a fresh Python, under ``launcher`` if given; exit code, standard output and error.

    ``changes`` are environment variables, ``None`` removes one.
    """
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    environment = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
    done = subprocess.run(
        [*(launcher or [sys.executable]), str(path)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below ``pid``."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_for(*paths: Path, seconds: float = LIMIT) -> None:
    """Until all ``paths`` are there."""
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"not all of {paths} came"
        time.sleep(0.02)


def all_gone(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether all of ``processes`` end within ``seconds``; one that nobody has reaped yet has ended."""
    deadline = time.monotonic() + seconds
    while any(_runs(one) for one in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def loaded(job: Any, payload: dict[str, Any]) -> list[str]:
    """Which of ``payload["names"]`` a worker has imported that does nothing with them."""
    return [name for name in payload["names"] if name in sys.modules]
