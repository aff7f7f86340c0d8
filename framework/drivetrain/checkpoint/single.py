"""A checkpoint that is one file: a dictionary written by ``torch.save``, complete or absent, checked when it is read.

torch writes a zip archive, whose directory stands at its end and which holds a checksum (CRC-32) of every record. A
file that was cut short has no directory, and a changed byte does not fit its record's checksum; files that others wrote
with ``torch.save`` are checked in the same way.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import glob
import os
import pathlib
import pickle
import re
import secrets
import uuid
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from drivetrain.checkpoint.manifest import ADVICE, flush_directory
from drivetrain.checkpoint.trust import trusted
from drivetrain.errors import CheckpointError, MissingCheckpointError
from drivetrain.local_path import is_address

EXTENSION = ".ckpt"
_ZIP, _PICKLE = b"PK", b"\x80"
_OLD = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # torch's number that its format before 1.6 begins with
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)-[0-9a-f]{12}\.writing")

# Plain classes of the standard library and numpy's scalars and arrays: making one runs nothing of the file's choosing.
# Lightning's attribute dictionaries become ordered ones, whether or not Lightning is installed.
_SAFE: list[Any] = [
    pathlib.PosixPath,
    pathlib.PurePosixPath,
    (pathlib.PosixPath, "pathlib._local.PosixPath"),
    (pathlib.PurePosixPath, "pathlib._local.PurePosixPath"),
    argparse.Namespace,
    set,
    frozenset,
    list,
    dict,
    int,
    float,
    str,
    complex,
    bytearray,
    slice,
    range,
    datetime.datetime,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    decimal.Decimal,
    uuid.UUID,
    np.ndarray,
    np.dtype,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    (np._core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),  # type: ignore[attr-defined]
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    (np._core.multiarray.scalar, "numpy.core.multiarray.scalar"),  # type: ignore[attr-defined]
    *{type(np.dtype(kind)) for kind in "?bhilqBHILQefdFD"},
    *(
        (collections.OrderedDict, f"{module}.AttributeDict")
        for module in (
            "lightning.fabric.utilities.data",
            "lightning_fabric.utilities.data",
            "lightning.pytorch.utilities.parsing",
            "pytorch_lightning.utilities.parsing",
        )
    ),
]


def is_file(path: str | Path) -> bool:
    """Whether ``path`` is a checkpoint in one file (or a link to one), and no folder or text that names another."""
    path = Path(path)
    if not path.is_file():
        return False
    with open(path, "rb") as stream:
        start = stream.read(2)
    return start == _ZIP or start.startswith(_PICKLE)


def write(content: dict[str, Any], path: str | Path) -> Path:
    """Write ``content`` at ``path``, in the place of a file that may be there: first under a hidden name beside it,
    flushed to the disk, then renamed. Whatever happens, ``path`` is what it was before or the whole new file.

    Raises:
        CheckpointError: the disk refused, something cannot be pickled, or ``path`` is a folder.
    """
    path = Path(path).absolute()
    what = f"the checkpoint {path} was not saved"
    if path.is_dir() and not path.is_symlink():
        raise CheckpointError(f"{what}: there is a folder of that name; remove it or save under another name")
    fresh = path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(6)}.writing"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        try:
            with open(fresh, "wb") as stream:
                torch.save(content, stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
        flush_directory(path.parent)
    except (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError) as error:
        from drivetrain.checkpoint.agreement import reason

        raise CheckpointError(f"{what}: {reason(error)}") from error
    return path


def verify(path: Path) -> None:
    """Compare every record of the file with its checksum.

    Raises:
        CheckpointError: it is cut short or damaged, or torch did not write it.
    """
    stranger = f"{path} is not a checkpoint: torch did not write it; name a file that a Trainer saved"
    try:
        if not zipfile.is_zipfile(path):
            with open(path, "rb") as stream:
                start = stream.read(32)
            if start.startswith(_ZIP):
                raise CheckpointError(f"the checkpoint {path} is damaged: it was cut short; {ADVICE}")
            if _OLD not in start:
                raise CheckpointError(stranger)
            return  # torch's format before version 1.6 has no checksums
        with zipfile.ZipFile(path) as archive:
            if not any(name.endswith("/data.pkl") for name in archive.namelist()):
                raise CheckpointError(stranger)
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged: it cannot be read ({error}); {ADVICE}") from error
    if damaged is not None:
        raise CheckpointError(
            f"the checkpoint {path} is damaged: the content of {damaged} has changed since it was written; {ADVICE}"
        )


def read(
    source: str | Path | IO[bytes], *, weights_only: bool | None = None, map_location: Any = "cpu", check: bool = True
) -> dict[str, Any]:
    """The dictionary in the file.

    Args:
        source: a path, or a stream that is open for reading.
        weights_only: as :func:`~drivetrain.checkpoint.trust.trusted` takes it. What is in a trusted file may run code
            while it is loaded. Of another only tensors, plain data and the standard library's plain classes are made.
        map_location: where tensors go, as ``torch.load`` takes it.
        check: compare with the checksums first.

    Raises:
        CheckpointError: there is no such file, it is damaged, it holds no dictionary, or it needs more trust; the
            message then names the class.
    """
    if isinstance(source, (str, Path)):
        source = os.path.expanduser(source)
    name = str(getattr(source, "name", None) or "the stream") if hasattr(source, "read") else str(source)
    if isinstance(source, (str, Path)):
        if is_address(source):
            raise CheckpointError(f"{source} is an address, not a file: download it and name the file")
        if not Path(source).is_file():
            raise MissingCheckpointError(f"there is no checkpoint {source}; name a file that exists")
        if check:
            verify(Path(source))
    try:
        if trusted(weights_only):
            content = torch.load(source, map_location=map_location, weights_only=False)
        else:
            known = torch.serialization.get_safe_globals()  # what the user allowed stays allowed afterwards
            with torch.serialization.safe_globals([kind for kind in _SAFE if kind not in known]):
                content = torch.load(source, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        if trusted(weights_only):
            raise CheckpointError(f"the checkpoint {name} cannot be loaded: {_first_line(error)}; {ADVICE}") from error
        asked = re.search(r"(?:GLOBAL|[Cc]lass|type) [`']?([\w.]+\.[\w.]+)", str(error))
        what = f"an object of {asked[1]}" if asked else "more than plain data"
        raise CheckpointError(
            f"the checkpoint {name} holds {what}, which loading must not make unasked: pass weights_only=False if you"
            " trust where the file comes from"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, ImportError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint {name} cannot be loaded: {_first_line(error)}; {ADVICE}") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"the checkpoint {name} holds a {type(content).__name__} and no dictionary; name a checkpoint of a Trainer"
        )
    return content


def files(folder: Path) -> list[Path]:
    """The checkpoints in one file in ``folder``, the newest by the clock first; links are left out."""
    if not folder.is_dir():
        return []
    found = [
        path
        for path in folder.iterdir()
        if path.suffix == EXTENSION and not path.name.startswith(".") and not path.is_symlink() and is_file(path)
    ]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def _sweep(path: Path) -> None:
    """Delete what dead writers of ``path`` on this machine left."""
    for other in path.parent.glob(f".{glob.escape(path.name)}.*.writing"):  # names of metrics may have brackets
        match = _TEMPORARY.fullmatch(other.name)
        if match and match["name"] == path.name and not Path(f"/proc/{match['pid']}").exists():
            other.unlink(missing_ok=True)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
