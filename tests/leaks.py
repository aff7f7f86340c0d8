"""What a test may leave behind in this process: nothing. Two snapshots and their difference."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from tests.patience import GONE

# pytest and hypothesis keep these; torch's own pools live as long as the process by design.
KEPT_FILES = {"__pycache__", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache", ".coverage"}
KEPT_VARIABLES = {"PYTEST_CURRENT_TEST"}
# How names of threads begin that live as long as the process: those of torch's backward (one a device), of a GPU's
# driver, begun by who asks whether there is a GPU, and of the allocator that comes with pyarrow.
KEPT_THREADS = ("pt_autograd_", "cuda", "jemalloc_bg_thd")
SETTLE = GONE  # seconds that something on its way out may take


@dataclass(frozen=True)
class Snapshot:
    """What this process holds at one moment, each as a mapping from an identity to words for a person."""

    process: dict[Any, str]
    thread: dict[Any, str]
    port: dict[Any, str]
    variable: dict[Any, str]
    handler: dict[Any, str]
    group: dict[Any, str]
    file: dict[Any, str]


def snapshot() -> Snapshot:
    """The present state of this process, its working folder and its temporary folder."""
    me = psutil.Process()
    return Snapshot(
        process={child.pid: _describe(child) for child in me.children(recursive=True)},
        thread=_threads(),
        port={
            (one.laddr.ip, one.laddr.port): f"{one.laddr.ip}:{one.laddr.port}"
            for one in me.net_connections(kind="inet")
            if one.status == psutil.CONN_LISTEN and one.type == socket.SOCK_STREAM
        },
        variable={(name, value): f"{name}={value}" for name, value in os.environ.items() if name not in KEPT_VARIABLES},
        handler={
            (number, signal.getsignal(number)): f"{signal.Signals(number).name}: {signal.getsignal(number)!r}"
            for number in signal.valid_signals()
            if number in signal.Signals.__members__.values()
        },
        group={"default": "the default process group"} if dist.is_available() and dist.is_initialized() else {},
        file=_files(),
    )


def difference(before: Snapshot, after: Snapshot) -> list[str]:
    """One line for each thing that is in ``after`` and was not in ``before``; also what has gone missing there where
    something missing is as bad (a variable or a handler removed, another working folder)."""
    lines = []
    for field in fields(Snapshot):
        old, new = getattr(before, field.name), getattr(after, field.name)
        lines += [f"{field.name}: {new[key]}" for key in new if key not in old]
        if field.name == "variable":
            names = {name for name, _ in new}
            lines += [f"variable: {name} was removed" for name, _ in old if name not in names]
    return lines


def left_behind(before: Snapshot, settle: float | None = None) -> list[str]:
    """The lines of :func:`difference` that are still true after ``settle`` (else ``SETTLE``) seconds."""
    deadline = time.monotonic() + (SETTLE if settle is None else settle)
    while lines := difference(before, snapshot()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return lines


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return str(process.pid)


def _threads() -> dict[Any, str]:
    """All threads of the operating system: those that torch or a store started are not in ``threading.enumerate``."""
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            comm = (task / "comm").read_text().strip()
        except OSError:
            continue  # it ended meanwhile
        if not comm.startswith(KEPT_THREADS):
            found[int(task.name)] = f"{named.get(int(task.name), 'native')} ({comm})"
    return found


def _files() -> dict[Any, str]:
    here = Path.cwd()
    places = {here, Path(tempfile.gettempdir())}
    found = {(place / name): str(place / name) for place in places for name in os.listdir(place)}
    kept = {path: words for path, words in found.items() if path.name not in KEPT_FILES}
    return kept | {("working folder", here): f"the working folder became {here}"}
