"""Paths that are given to a run: of this machine's file systems, with ``~`` for the user's folder.

An address would become a folder called ``s3:``, and ``~`` one of that name.
"""

from __future__ import annotations

import os
import re

from drivetrain.errors import ConfigurationError

_ADDRESS = re.compile(r"\w[\w+.-]*://")


def is_address(path: object) -> bool:
    """Whether ``path`` names a place on a network (``s3://bucket/runs``)."""
    return isinstance(path, str | os.PathLike) and _ADDRESS.match(os.fspath(path)) is not None


def local_path(path: str | os.PathLike[str], what: str) -> str:
    """``path`` as a string, with ``~`` replaced.

    Args:
        what: the argument it came by, for the message.

    Raises:
        ConfigurationError: it is an address.
    """
    if is_address(path):
        raise ConfigurationError(
            f"{what}={os.fspath(path)!r} is an address, and what a run leaves are local files: name a folder, and copy"
            " it when the run is over, or mount the address."
        )
    return os.path.expanduser(path)
