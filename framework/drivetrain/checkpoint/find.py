"""Which checkpoint is meant by ``last``, ``best``, ``auto`` or a path, and keeping ``last`` true."""

from __future__ import annotations

import os
import re
import secrets
import warnings
from dataclasses import dataclass
from pathlib import Path

from drivetrain.checkpoint import manifest, replace, single
from drivetrain.errors import CheckpointError, MissingCheckpointError, NoCheckpointError, nearest

LAST = "last.ckpt"


@dataclass(frozen=True)
class Verified:
    """A checkpoint that :func:`resolve` found before workers started: they need not look for it or check it again."""

    path: Path


def resolve(spec: str | Path, folder: str | Path, best: str | Path | None = None) -> Path | None:
    """The checkpoint that ``spec`` means, every byte of it checked (``load`` need not verify it again).

    Args:
        spec: ``"last"`` (``last.ckpt`` in ``folder`` or where it points, else the newest), ``"auto"`` (the newest, or
            None when there is none), ``"best"`` (``best``), or a path, absolute, relative to the working directory or
            to ``folder``: of a checkpoint, or of a run's folder or a folder of checkpoints, of which it means the last.
        folder: where the run keeps its checkpoints.
        best: the best checkpoint, as whoever keeps the scores knows it.

    ``auto`` and ``last`` pass over damaged checkpoints, with a warning for each, to the newest that is whole.
    Checkpoints in one file come before folders.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    folder = Path(folder)
    if spec == "best":
        if best is None:
            raise NoCheckpointError(
                "there is no best checkpoint yet: no metric was monitored when saving; use 'last' or a path"
            )
        return _checked(_existing(Path(best), folder))
    if spec not in ("auto", "last"):
        given = Path(spec).expanduser()
        if (given / "checkpoints").is_dir():
            spec, folder = "last", given / "checkpoints"
        elif given.is_dir() and (single.files(given) or ordered(given)):
            spec, folder = "last", given
        else:
            return _checked(_existing(given, folder))
    candidates = [*single.files(folder), *ordered(folder)]
    if spec == "last":
        named = [path for path in candidates if re.fullmatch(r"last(-v\d+)?", path.stem)]
        target = last(folder)
        first = named or ([] if target is None else [target])
        candidates = [*first, *(path for path in candidates if path not in first)]
    for path in candidates:
        try:
            return _checked(path)
        except CheckpointError as error:
            warnings.warn(f"{error}; going back to the checkpoint before it", stacklevel=2)
    if spec == "auto":
        return None
    raise CheckpointError(
        f"there is no complete checkpoint in {folder}; start without resume, name another folder, or say auto, which"
        " starts anew where there is none"
    )


def ordered(folder: str | Path) -> list[Path]:
    """The checkpoints in ``folder`` with a readable manifest, newest first: by global step, then by time of writing."""
    found: list[tuple[int, float, Path]] = []
    for path in replace.complete(Path(folder)):
        try:
            content = manifest.read(path)
        except CheckpointError as error:
            warnings.warn(f"{error}; it is passed over", stacklevel=2)
            continue
        found.append((content["global_step"], content["time"], path))
    return [path for _, _, path in sorted(found, reverse=True)]


def newest(folder: str | Path) -> Path | None:
    """The newest checkpoint in ``folder``; None when there is none."""
    return next(iter(ordered(folder)), None)


def last(folder: str | Path) -> Path | None:
    """The checkpoint that ``last.ckpt`` in ``folder`` means; None where it is absent or points at nothing."""
    target = replace.locate(Path(folder) / LAST)
    return target if _exists(target) else None


def point_last(folder: str | Path, name: str) -> Path:
    """Make ``last.ckpt`` in ``folder`` mean the checkpoint ``name`` there. It always means one or the other.

    A checkpoint is a folder or a file.

    A relative link, so that the folder can move; a file that holds the name where the file system has no links.

    Raises:
        CheckpointError: ``name`` is no complete checkpoint of ``folder``, or is ``last.ckpt``, or that is no link.
    """
    folder = Path(folder)
    target, link = folder / name, folder / LAST
    if Path(name).name != name or name == LAST or target.is_symlink():
        raise CheckpointError(
            f"{LAST} cannot point at {name!r}: it must be the name of a checkpoint in {folder} itself"
        )
    if not _exists(replace.locate(target)):
        raise CheckpointError(f"{LAST} cannot point at {target}: there is no complete checkpoint; save it first")
    if not link.is_symlink() and (link.is_dir() or single.is_file(link)):
        raise CheckpointError(f"{link} is a checkpoint itself and cannot become a link; rename or remove it")
    fresh = folder / f".{LAST}.{secrets.token_hex(6)}.removing"  # a name that the next save sweeps away
    try:
        try:
            fresh.symlink_to(name)
        except (NotImplementedError, PermissionError):
            fresh.write_text(name + "\n", encoding="utf-8")
        os.replace(fresh, link)
        manifest.flush_directory(folder)
    except OSError as error:
        raise CheckpointError(
            f"{link} cannot be written ({error.strerror}); check the folder's permissions and space"
        ) from error
    return link


def remove(path: str | Path) -> None:
    """Delete the checkpoint at ``path``. Where ``last.ckpt`` means it, that is first moved to the newest other one.

    Raises:
        CheckpointError: it is not a checkpoint, or cannot be deleted.
    """
    path = Path(path)
    found = replace.locate(path)
    if path.is_symlink() or not _exists(found):
        raise CheckpointError(f"{path} is not a checkpoint; only checkpoints are removed")
    folder = path.parent
    link = folder / LAST
    try:
        if last(folder) == found and path.name != LAST:
            others = [other for other in [*single.files(folder), *ordered(folder)] if other not in (found, link)]
            if others:
                point_last(folder, replace.visible_name(others[0]))
            else:
                link.unlink()
        if found.is_file():
            found.unlink()
        else:
            replace.delete(found)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be removed ({error.strerror}); check the folder's permissions"
        ) from error


def _existing(path: Path, folder: Path) -> Path:
    for candidate in (path, folder / path):
        found = replace.locate(candidate)
        if found.exists():
            return found
    places = (path.parent, folder)
    names = {replace.visible_name(found) for place in places for found in replace.complete(place)}
    names |= {found.name for place in places for found in single.files(place)}
    raise MissingCheckpointError(f"there is no checkpoint {path}; {nearest(path.name, names)}")


def _exists(path: Path) -> bool:
    """Whether a complete checkpoint lies at ``path``: a folder with a manifest, or a file."""
    return (path / manifest.NAME).is_file() or single.is_file(path)


def _checked(path: Path) -> Path:
    if path.is_file():
        single.verify(path)
        return path
    manifest.verify(path, manifest.read(path))
    return path
