"""What the commands share: arguments and files of output whose mistakes are one sentence, said before any work."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from drivetrain.errors import ConfigurationError, nearest

IMAGES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises :class:`ConfigurationError` instead of leaving the process, and that suggests the
    option nearest to one that it does not know."""

    def parse_args(  # type: ignore[override]  # of the overloads only this one is used
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        found, rest = self.parse_known_args(args, namespace)
        if not rest:
            return found
        word = rest[0].partition("=")[0]
        if not word.startswith("-"):
            raise ConfigurationError(f"{self.prog} has no use for {word!r}: see {self.prog} --help")
        raise ConfigurationError(f"{self.prog} has no option {word!r}: {nearest(word, self._option_string_actions)}")

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}: see {self.prog} --help")


def require_writable(path: Path, option: str, *, image: bool = False) -> None:
    """Raise where ``path`` cannot become a file, before the work whose result it is to hold.

    Missing folders are no obstacle unless it is an ``image``, whose folder must be there.

    Raises:
        ConfigurationError: it is a folder, may not be written, or an ``image`` has a suffix of none.
    """
    if image and path.suffix.lower() not in IMAGES:
        raise ConfigurationError(f"{option} {path} is no image: name a file that ends in {', '.join(IMAGES)}.")
    if path.is_dir():
        raise ConfigurationError(f"{option} {path} is a folder: name a file in it.")
    folder = path.parent
    while not image and not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ConfigurationError(f"{option} {path} has no folder {folder}: make it, or name another file.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigurationError(f"{option} {path} may not be written: name another file.")
