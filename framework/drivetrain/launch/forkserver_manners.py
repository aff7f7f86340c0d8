"""Imported first of all in a forkserver: signals that are sent to the launcher's whole process group, as Ctrl-C,
``timeout`` and schedulers do, are the launcher's to answer. A forkserver that one of them ended would take its workers
with it, before they could save."""

from __future__ import annotations

import signal

FORMER = {
    signum: signal.signal(signum, signal.SIG_IGN)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
}


def leave() -> None:
    """Have the signals back in a worker that the forkserver has started."""
    for signum, handler in FORMER.items():
        signal.signal(signum, handler)
