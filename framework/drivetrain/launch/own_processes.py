"""Processes that a worker starts, its loaders' above all, end with it however it ends.

Torch's loader processes look every five seconds whether the one that they read for is there. Until then they would
outlive a job that was killed, and hold a dead worker's connections open, whose end the other workers wait for.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import util

PR_SET_PDEATHSIG = 1


class _Forks:
    """What a fork needs to know of the moment before it."""

    by_main_thread = False
    noticed = False


def bind() -> None:
    """From now on have this process's daemonic processes that are forked by its main thread killed with it.

    Daemonic ones only: Python ends them with their parent in any case. By the main thread only: the kernel's notice is
    of the thread's end, and other threads may end before what they began. Can be called again; Linux only.
    """
    if _Forks.noticed or sys.platform != "linux":
        return
    _Forks.noticed = True
    os.register_at_fork(before=_note)
    util.register_after_fork(_Forks, _bind_child)


def _note() -> None:
    _Forks.by_main_thread = threading.current_thread() is threading.main_thread()


def _bind_child(_: object) -> None:
    parent = multiprocessing.parent_process()
    if parent is None or not _Forks.by_main_thread or not multiprocessing.current_process().daemon:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:
        os._exit(1)  # it died before the line above
