"""Temporary folders whose owner can be seen to live, so that those of killed owners are removed by the next start.

The owner holds a lock on a file in its folder. A lock goes with the last process that has it open, so it tells more
than a process number would: numbers are used again, and differ between containers that share a temporary folder.
Workers that were forked hold it too, and keep the folder until the last of them is gone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from drivetrain.errors import ConfigurationError

OWNER = "owner"
PREFIX = "drivetrain-"
# Bytes of the path in which folders are made. Sockets of loader processes lie in them, whose paths may have 103 bytes
# on the strictest system: 28 are the folder's name with the longest purpose, 18 that of Python's sockets.
LONGEST = 57
SHORT = Path("/tmp")


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """A new folder ``drivetrain-<purpose>-...``, removed on leaving; first removes those whose owners were killed."""
    remove_stale()
    folder, lock = _new(purpose)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_stale() -> None:
    """Remove this user's folders that nobody holds any more. What cannot be read or removed is left alone."""
    for folder in _place().glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)  # without this file it is no folder of ours
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _place() -> Path:
    """The system's temporary folder, or :data:`SHORT` where sockets could not be made in that for its length."""
    place = Path(tempfile.gettempdir())
    if len(os.fsencode(place)) <= LONGEST:
        return place
    if not os.access(SHORT, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"sockets cannot be made in the temporary folder {place}, whose path is longer than {LONGEST} bytes, and"
            f" {SHORT} cannot be written: set TMPDIR to a shorter one"
        )
    return SHORT


def _new(purpose: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-", dir=_place()))
        lock = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another start took it for stale before it was locked, and removes it
            os.close(lock)
            continue
        if (folder / OWNER).exists():
            return folder, lock
        os.close(lock)
