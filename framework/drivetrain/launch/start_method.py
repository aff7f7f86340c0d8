"""Fork or forkserver: whether a copy of this very process would be a sound one.

A fork copies the memory but only the forking thread. Whatever a thread pool or a CUDA context believed about its other
threads is then false, and the first parallel operation in the child waits for ever.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
from pathlib import Path

from drivetrain.errors import ConfigurationError

START_METHODS = ("auto", "fork", "forkserver")
OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b")
OPENBLAS_COUNT = (
    "scipy_openblas_get_num_threads64_",
    "openblas_get_num_threads64_",
    "scipy_openblas_get_num_threads",
    "openblas_get_num_threads",
)
# Threads by the name they give themselves that a fork does without. jemalloc, which comes with pyarrow and so with
# pandas, holds its locks across a fork and frees memory in the child by itself. CUDA's driver keeps a thread even where
# it may see no GPU (CUDA_VISIBLE_DEVICES=""); one that sees some has opened them, which is looked at before that.
HARMLESS = re.compile(r"jemalloc_bg_thd|cuda[0-9a-f]+")
SETTLE = 0.1  # seconds: an OpenMP thread spins that long at most before it sleeps where it can be recognised


def choose(start_method: str) -> str:
    """The start method for the workers: ``"fork"`` where that is sound, else ``"forkserver"``.

    Args:
        start_method: ``"auto"``, or the method that the user insists on.

    Raises:
        ConfigurationError: the name is unknown, or fork was asked for and would hang.
    """
    if start_method not in START_METHODS:
        raise ConfigurationError(f"start_method={start_method!r} is unknown: use one of {', '.join(START_METHODS)}")
    if start_method == "forkserver":
        return start_method
    reason = why_not_fork()
    if reason is None:
        return "fork"
    if start_method == "fork":
        raise ConfigurationError(f"start_method=fork would hang because {reason}: use start_method=auto")
    return "forkserver"


def why_not_fork() -> str | None:
    """Half a sentence that says what makes a fork of this process unsound, or ``None``."""
    if sys.platform != "linux":
        return "this system does not say which threads a process has"
    if threading.active_count() > 1:
        names = ", ".join(sorted(one.name for one in threading.enumerate() if one is not threading.current_thread()))
        return f"this process has other Python threads ({names})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "this process has initialised CUDA"
    if any(target.startswith("/dev/nvidia-uvm") for target in _open_files()):
        # cuInit opens it, and torch.cuda.is_available() calls cuInit without initialising torch's CUDA.
        return "this process has touched the CUDA driver"
    return _native_threads()


def _open_files() -> list[str]:
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(os.readlink(entry))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return targets


def _native_threads() -> str | None:
    """Threads that are not Python's. OpenBLAS keeps some from the moment numpy is imported and takes them down before a
    fork by itself; an OpenMP pool, which torch starts with its first parallel operation, does not."""
    deadline = time.monotonic() + SETTLE
    libraries = _libraries()
    while True:
        places = _places_of_native_threads(libraries)
        computed = any(OPENMP.search(place) for place in places)
        # A thread of Python's that was joined is a native one for a moment more, until the system has taken it down.
        settled = "running" not in places and (computed or len(places) <= _openblas_threads(libraries))
        if settled or time.monotonic() > deadline:
            break
        time.sleep(0.002)
    if "running" in places or computed:
        return "this process has computed with several threads"
    return None if settled else f"this process has {len(places)} threads of libraries"


def _libraries() -> list[tuple[int, int, str]]:
    """Start, end and path of each piece of code in memory."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *rest = line.split(maxsplit=5)
        if "x" in mode and len(rest) == 4:
            start, end = span.split("-")
            found.append((int(start, 16), int(end, 16), rest[3]))
    return found


def _places_of_native_threads(libraries: list[tuple[int, int, str]]) -> list[str]:
    """For each native thread the file name of the library whose code it sleeps in, ``"running"``, or ``"unknown"``."""
    # Of the calling thread Python keeps the number that it had before a fork, unless multiprocessing made that.
    python = {thread.native_id for thread in threading.enumerate()} | {threading.get_native_id()}
    places = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) in python:
            continue
        try:
            if HARMLESS.fullmatch((task / "comm").read_text().strip()):
                continue
            fields = (task / "syscall").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        except OSError:
            places.append("unknown")  # a kernel that hides it
            continue
        if len(fields) == 1:
            places.append("running")
            continue
        counter = int(fields[-1], 16)
        names = [os.path.basename(path) for start, end, path in libraries if start <= counter < end]
        places.append(names[0] if names else "unknown")
    return places


def _openblas_threads(libraries: list[tuple[int, int, str]]) -> int:
    """How many threads the OpenBLAS libraries of this process keep beside the calling one."""
    total = 0
    for path in {path for _, _, path in libraries if "openblas" in os.path.basename(path)}:
        library = ctypes.CDLL(path)
        for name in OPENBLAS_COUNT:
            if hasattr(library, name):
                total += max(0, int(getattr(library, name)()) - 1)
                break
    return total
