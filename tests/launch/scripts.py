"""Run a launching program as a process of its own, so that it may be killed, or have computed with threads."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


def environment(**changes: str | None) -> dict[str, str]:
    """This process's variables with ``changes``; ``None`` removes one."""
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def write(folder: Path, text: str, name: str = "program.py") -> Path:
    """Write ``text`` without its common indentation to a file."""
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


@contextmanager
def running(path: Path, *arguments: str, **changes: str | None) -> Iterator[subprocess.Popen[str]]:
    """The program as a process in a session of its own; killed with all its descendants at the end."""
    process = subprocess.Popen(
        [sys.executable, str(path), *arguments],
        env=environment(**changes),
        cwd=path.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        family = [process, *descendants(process.pid)]
        for one in family:
            one.kill()
        process.communicate()


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below ``pid``."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_for(path: Path, seconds: float = 30.0) -> None:
    """Until ``path`` is there."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


def all_gone(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether all of ``processes`` end within ``seconds``."""
    deadline = time.monotonic() + seconds
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
