"""The transport's threads at the end of a script and where a process is forked: they let go of what they sent before.

A thread of Gloo's (of NCCL's, too) tells that an operation is over and drops its tensors, which takes Python's locks.
Where the script ends in between, they are never given again: Python ends the thread instead, within a destructor, and
the C++ runtime ends the process with SIGABRT; whoever started the job then kills the other ranks, which may still
write. Where the process is forked (a loader's processes are) while the thread has one of them, it stays taken in the
new process, which stands before its first line; Python up to 3.11 makes that lock anew there, too late. A thread has
it for long where it needs memory meanwhile, since that waits for the fork.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

_NAMES = ("pt_gloo_runloop", "pt_nccl_watchdg")
_LOOK_EVERY = 0.001  # seconds without Python's lock, which a thread may be waiting for
_PATIENCE = 5.0  # seconds; a thread that is still at it by then has an operation that will never be over
_PATIENCE_OF_FORKS = 1.0  # seconds; one that is at it by then computes, and holds none of Python's locks


@cache
def await_them() -> None:
    """Have this process wait for them when it ends, after all else that is registered later, and before it forks."""
    atexit.register(await_rest)
    os.register_at_fork(before=partial(await_rest, _PATIENCE_OF_FORKS))


def await_rest(patience: float = _PATIENCE) -> None:
    """Return when none of them is at work, in two looks one after the other, or after ``patience`` seconds."""
    deadline, at_rest = time.monotonic() + patience, 0
    while at_rest < 2 and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY)
        at_rest = 0 if _at_work() else at_rest + 1


def _at_work() -> bool:
    """Whether one of them runs or would if there were a processor for it. Elsewhere than on Linux nobody can say."""
    if sys.platform != "linux":
        return False
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            named, _, told = (thread / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")
            if named.endswith(_NAMES) and told.split()[0] == "R":
                return True
    return False
