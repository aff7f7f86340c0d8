"""Where ``conf/`` and ``recipes/`` lie: inside the package once installed, beside ``framework/`` in a checkout; and
whether a run's folder can be written, and is nobody else's at the moment."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from drivetrain.errors import ConfigurationError


def _places(name: str) -> tuple[Path, Path]:
    package = Path(str(files("drivetrain"))).resolve()
    return package / "_data" / name, package.parents[1] / name


def folder(name: str) -> Path:
    """The folder ``name`` (``"conf"`` or ``"recipes"``) that came with drivetrain.

    Raises:
        ConfigurationError: when it is in neither place, so the installation is incomplete.
    """
    shipped, checkout = _places(name)
    for place in (shipped, checkout):
        if place.is_dir():
            return place
    raise ConfigurationError(f"the folder {name}/ is neither at {shipped} nor at {checkout}: install drivetrain again.")


def make_importable() -> None:
    """Let a config name ``recipes.NAME...`` or a module of the working directory as ``_target_``."""
    recipes = [place.parent for place in _places("recipes") if place.is_dir()]
    for place in (Path.cwd(), *recipes[:1]):
        if str(place) not in sys.path:
            sys.path.append(str(place))


def refuse_unwritable(folder: Path, what: str, instead: str) -> None:
    """Raise :class:`ConfigurationError` where ``folder`` cannot be made or written, without making it.

    Args:
        what: the folder's name in the sentence.
        instead: what to choose.
    """
    place = folder.absolute()
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir():
            raise ConfigurationError(f"{what} {folder} cannot be made: {place} is a file; choose {instead}")
        with tempfile.TemporaryFile(dir=place):
            return
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigurationError(f"{what} {folder} cannot be written: {place}: {reason}; choose {instead}") from error


_held: set[int] = set()  # descriptors of the folders that this process holds


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep ``folder`` for this process while it lasts: two runs in one would mix their checkpoints and records.

    The lock is the kernel's and the processes that are forked meanwhile have no part in it: it ends with this process,
    whatever ends that. Where the file system has no locks there is none.

    Raises:
        ConfigurationError: another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    _held.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ConfigurationError(
                    f"another run is at work in {folder}: wait for its end, or choose another folder with"
                    " hydra.run.dir=FOLDER"
                ) from error
        yield
    finally:
        if descriptor in _held:  # not in a fork
            _held.remove(descriptor)
            os.close(descriptor)


def refuse_in_use(folder: Path) -> None:
    """Raise :class:`ConfigurationError` where another process holds ``folder``; it need not be there."""
    if folder.is_dir():
        with held(folder):
            pass


def _let_go() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)
