"""Putting a finished directory in the place of another so that a kill at any instant leaves one of the two.

Hidden siblings, all named ``.NAME.<12 hex digits>.<state>``:

- ``saving``: being written, or replaced and not yet deleted. Its writer holds a lock on it; without the lock it is
  rubbish and the next save into the folder deletes it.
- ``removing``: being deleted.
- ``replaced``: the complete old NAME, on file systems that cannot exchange two names at once. As long as NAME itself is
  missing this *is* NAME: :func:`locate` finds it and the next save puts it back.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from drivetrain.checkpoint import manifest, single
from drivetrain.errors import CheckpointError

_HIDDEN = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{12}\.(?P<state>saving|removing|replaced)")
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)


class Staging:
    """A locked hidden directory beside ``path`` in which its next content is written; deleted unless published.

    Raises:
        OSError: the folder cannot be made or written to.
        CheckpointError: ``path`` exists and is no checkpoint; it would be a pity to replace it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        folder = path.parent
        if not path.is_symlink() and path.exists() and not (path / manifest.NAME).is_file():
            raise CheckpointError(f"{path} exists and is not a checkpoint; remove it or save under another name")
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        self.folder, self._lock = _locked_directory(path)

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _discard(self.folder)
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # a child that was forked meanwhile holds the same lock
        os.close(self._lock)

    def publish(self) -> None:
        """Give the directory its name. Afterwards, what had the name before is at the hidden one (and soon deleted)."""
        if not os.path.lexists(self.path):
            os.rename(self.folder, self.path)
        else:
            try:
                exchange(self.folder, self.path)
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
                replaced = _hidden(self.path, "replaced")
                os.rename(self.path, replaced)
                try:
                    os.rename(self.folder, self.path)
                except OSError:
                    os.rename(replaced, self.path)
                    raise
                manifest.flush_directory(self.path.parent)
                _discard(replaced)
        manifest.flush_directory(self.path.parent)


def exchange(first: Path, second: Path) -> None:
    """Swap two names of one file system in one step (Linux ``renameat2``).

    Raises:
        OSError: the kernel or the file system cannot (errno ENOSYS, EINVAL, ...), or a name is missing.
    """
    renameat2 = _renameat2()
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(second))


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
        function.restype = ctypes.c_int
    return function


def locate(path: Path) -> Path:
    """Where the checkpoint called ``path`` lies: there, where a link there leads, or aside when its replacement was cut
    short. A link that leads nowhere, or to itself, is returned as it is."""
    if (target := _pointed_at(path)) is not None:
        named = path.parent / target
        found = (
            named if named.is_symlink() else locate(named)
        )  # a chain of links is left to the kernel: it may be a ring
        return found if found.is_dir() or single.is_file(found) else path
    if os.path.lexists(path):
        return path
    aside = [found for found, name in _replaced(path.parent) if name == path.name]
    # Gone between the two looks: the replacement was just finished.
    return aside[0] if aside and not os.path.lexists(path) else path


def _pointed_at(path: Path) -> str | None:
    """What the link ``path`` names; a small file that holds a name is a link too, where the file system has none."""
    if path.is_symlink():
        return os.readlink(path)
    if path.is_file() and path.stat().st_size < 4096 and not single.is_file(path):
        name = path.read_text(encoding="utf-8", errors="replace").strip()
        return name if name.isprintable() and 0 < len(os.fsencode(name)) < 256 else None
    return None


def complete(folder: Path) -> list[Path]:
    """The checkpoints in ``folder`` that have a manifest, in no order, without links and hidden left-overs."""
    if not folder.is_dir():
        return []
    visible = [path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_symlink()]
    names = {path.name for path in visible}
    aside = [path for path, name in _replaced(folder) if name not in names]
    return [path for path in visible + aside if (path / manifest.NAME).is_file()]


def visible_name(path: Path) -> str:
    """The name that the checkpoint at ``path`` goes by, also when it lies aside."""
    match = _HIDDEN.fullmatch(path.name)
    return match["name"] if match else path.name


def delete(path: Path) -> None:
    """Delete the directory ``path``: first it loses its name, so that a half-deleted one is never found.

    Raises:
        OSError: it cannot be renamed.
    """
    doomed = _hidden(path, "removing")
    os.rename(path, doomed)
    _discard(doomed)


def sweep(folder: Path) -> None:
    """Delete what dead writers left in ``folder``, and put back what they were about to replace."""
    for path, name in _replaced(folder):
        if os.path.lexists(folder / name):
            _discard(path)
        else:
            os.rename(path, folder / name)
    for path in folder.iterdir():
        match = _HIDDEN.fullmatch(path.name)
        if match and (match["state"] == "removing" or (match["state"] == "saving" and _abandoned(path))):
            _discard(path)


def _replaced(folder: Path) -> list[tuple[Path, str]]:
    if not folder.is_dir():
        return []
    matches = [(path, _HIDDEN.fullmatch(path.name)) for path in folder.iterdir()]
    return [(path, match["name"]) for path, match in matches if match and match["state"] == "replaced"]


def _hidden(path: Path, state: str) -> Path:
    return path.parent / f".{path.name}.{secrets.token_hex(6)}.{state}"


def _locked_directory(path: Path) -> tuple[Path, int]:
    while True:
        folder = _hidden(path, "saving")
        folder.mkdir()
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another job's sweep came between; its lock was first
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        except OSError:  # no locks on this file system: then nobody's sweep deletes here, see _abandoned
            return folder, lock
        if folder.exists():
            return folder, lock
        os.close(lock)


def _abandoned(path: Path) -> bool:
    """Whether nobody holds the lock. The kernel frees it when the writer dies, however it dies, on whatever host."""
    if path.is_symlink():
        return True
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or this file system has no locks and the writer may be alive
        return False
    finally:
        os.close(lock)
    return True


def _discard(path: Path) -> None:
    """Delete rubbish. What cannot be deleted now has a hidden name that no finder takes, and is tried again later."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
