"""SIGINT and SIGTERM as a flag: the loop reads it at a step boundary, where a checkpoint is whole and ranks agree."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGTERM)

_pending: int | None = None
_of_the_script: dict[int, Any] = {}  # what the script itself does on SIGTERM, which it still does


def pending() -> int | None:
    """The number of the signal that asked this process to stop, else ``None``. Costs one read of a global."""
    return _pending


def clear() -> None:
    """Forget the signal; :func:`handling` does so at its outermost entry and exit."""
    global _pending  # noqa: PLW0603  a signal belongs to the process
    _pending = None


def _flag(signum: int, frame: FrameType | None) -> None:
    """Only remember: I/O or a collective here would interrupt one that is under way."""
    global _pending  # noqa: PLW0603
    if signum == signal.SIGINT and _pending == signal.SIGINT:
        raise KeyboardInterrupt
    _pending = signum
    handler = _of_the_script.get(signum)
    if handler is not None:
        handler(signum, frame)


@contextmanager
def handling() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into :func:`pending` for the length of a run; put the former handlers back at its end.

    A second SIGINT raises ``KeyboardInterrupt``; what the script itself does on SIGTERM is done as well. Off the main
    thread, where Python allows no handlers, and inside another ``handling`` nothing changes.
    """
    outermost = signal.getsignal(signal.SIGTERM) is not _flag
    if threading.current_thread() is not threading.main_thread() or not outermost:
        yield
        return
    clear()
    former: dict[int, Any] = {}
    try:
        for signum in HANDLED:
            former[signum] = signal.signal(signum, _flag)
        if callable(former[signal.SIGTERM]):
            _of_the_script[signal.SIGTERM] = former[signal.SIGTERM]
        yield
    finally:
        _of_the_script.clear()
        for number, handler in former.items():
            # None: installed by C code, which Python can neither name nor put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        clear()
