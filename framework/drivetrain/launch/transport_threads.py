"""The transport's threads at the end of a script: they let go of what they sent before Python ends.

A thread of Gloo's tells that an operation is over and then drops the tensors of it, which takes Python's lock. Where
the script ends in between, that lock is never given again: Python ends the thread instead, within a destructor, and the
C++ runtime ends the process with SIGABRT; whoever started the job then kills the other ranks, which may still write.
"""

from __future__ import annotations

import atexit
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_NAME = "pt_gloo_runloop"
_LOOK_EVERY = 0.001  # seconds without Python's lock, which a thread may be waiting for
_PATIENCE = 5.0  # seconds; a thread that is still at it by then has an operation that will never be over


@cache
def await_at_exit() -> None:
    """Have this process wait for them when it ends, after all else that is registered later."""
    atexit.register(await_rest)


def await_rest() -> None:
    """Return when none of them is at work, in two looks one after the other."""
    deadline, at_rest = time.monotonic() + _PATIENCE, 0
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
            if named.endswith(_NAME) and told.split()[0] == "R":
                return True
    return False
