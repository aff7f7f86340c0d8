"""Where ``conf/`` and ``recipes/`` lie: inside the package once installed, beside ``framework/`` in a checkout; and
whether a run's folder can be written."""

from __future__ import annotations

import sys
import tempfile
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
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ConfigurationError(f"{what} {folder} cannot be made: {place} is a file; choose {instead}")
    try:
        with tempfile.TemporaryFile(dir=place):
            return
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigurationError(f"{what} {folder} cannot be written: {place}: {reason}; choose {instead}") from error
