"""Drivetrain's warnings as a command shows them: a line each, and what only looks like an oversight once a sweep."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import drivetrain
from drivetrain.errors import PossibleUserWarning

_OURS = tuple(Path(folder) for folder in drivetrain.__path__)
_PLUGINS = "drivetrain_plugins"


@contextmanager
def in_plain_lines(told: Collection[str] = ()) -> Iterator[list[str]]:
    """While it lasts, what drivetrain warns of is a line without the place in its source. Hints
    (:class:`PossibleUserWarning`) that were ``told`` in an earlier job are left out; gives those that are shown."""
    shown: list[str] = []
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            text = str(message)
            if not _is_ours(filename):
                others(message, category, filename, lineno, file, line)
                return
            if issubclass(category, PossibleUserWarning):
                if text in told or text in shown:
                    return
                shown.append(text)
            print(f"warning: {text}", file=sys.stderr if file is None else file)

        warnings.showwarning = show
        yield shown


def _is_ours(filename: str) -> bool:
    path = Path(filename)
    return any(path.is_relative_to(folder) for folder in _OURS) or _PLUGINS in path.parts
