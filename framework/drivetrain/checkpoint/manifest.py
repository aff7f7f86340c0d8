"""The manifest: what a checkpoint is and the checksum of every file in it. Written last, read first."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from drivetrain.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 1
ADVICE = "use the checkpoint before it (resume=auto does) or restore this one from a copy"


def seal(file: Path) -> dict[str, Any]:
    """Flush ``file`` to the disk and return its size and SHA-256."""
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
        return {"bytes": stream.tell(), "sha256": digest}


def flush_directory(folder: Path) -> None:
    """Make the names in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(folder: Path, content: dict[str, Any]) -> None:
    """Write the manifest of ``folder`` and flush it.

    Raises:
        CheckpointError: ``content`` holds what JSON cannot carry.
    """
    try:
        text = json.dumps(content | {"checksum": _checksum(content)}, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's meta data must be plain numbers, strings and lists ({error})"
        ) from error
    with open(folder / NAME, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def read(folder: Path) -> dict[str, Any]:
    """The manifest of the checkpoint ``folder``, itself checked.

    Raises:
        CheckpointError: there is none, it is damaged, or a newer drivetrain wrote it.
    """
    try:
        content = json.loads((folder / NAME).read_bytes())
        checksum = content.pop("checksum")
        if checksum != _checksum(content):
            raise ValueError("its checksum does not match")
    except (FileNotFoundError, NotADirectoryError):
        problem = f"is not a checkpoint: it has no {NAME}" if folder.exists() else "is not there"
        raise CheckpointError(f"{folder} {problem}; name a folder that drivetrain wrote") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(
            f"the checkpoint {folder} is damaged: {NAME} cannot be read ({error}); {ADVICE}"
        ) from error
    if content["format"] > FORMAT:
        raise CheckpointError(
            f"the checkpoint {folder} has format {content['format']} and this drivetrain reads up to {FORMAT}; "
            "load it with the version that wrote it"
        )
    return content


def verify(folder: Path, content: dict[str, Any], *, checksums: bool = True) -> None:
    """Compare the files of ``folder`` with its manifest ``content``: sizes always, every byte with ``checksums``.

    Raises:
        CheckpointError: a file is missing or damaged; the message names it.
    """
    for name, expected in content["files"].items():
        file = folder / name
        try:
            if file.stat().st_size != expected["bytes"]:
                raise CheckpointError(
                    f"the checkpoint {folder} is damaged: {name} has {file.stat().st_size} bytes instead of "
                    f"{expected['bytes']}; {ADVICE}"
                )
            if not checksums:
                continue
            with open(file, "rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {folder} is damaged: {name} cannot be read ({error.strerror}); {ADVICE}"
            ) from error
        if digest != expected["sha256"]:
            raise CheckpointError(
                f"the checkpoint {folder} is damaged: the content of {name} has changed since it was written; {ADVICE}"
            )


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
