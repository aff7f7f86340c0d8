"""Names to plugins. drivetrain finds its own parts through the same entry points as a stranger's.

A plugin package declares, for example::

    [project.entry-points."drivetrain.strategies"]
    mine = "my_package:MINE"

Listing names imports nothing, so ``--help`` and error messages are fast.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from drivetrain.errors import ConfigurationError, nearest
from drivetrain.late_import import drawing_nothing


@cache
def _entries(group: str) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=f"drivetrain.{group}"):
        other = found.get(entry.name)
        if other is not None and other.value != entry.value:
            raise ConfigurationError(
                f"two installed packages offer {group} {entry.name!r} ({other.value} and {entry.value}): uninstall one."
            )
        found[entry.name] = entry
    return found


def names(group: str) -> list[str]:
    """Sorted names registered under ``drivetrain.<group>``, for example ``names("strategies")``."""
    return sorted(_entries(group))


def entry(group: str, name: str) -> EntryPoint:
    """The entry point called ``name``, not yet imported; unknown names are answered with the nearest known one."""
    entries = _entries(group)
    if name not in entries:
        what = f"{group[:-3]}y" if group.endswith("ies") else group.removesuffix("s")
        raise ConfigurationError(f"there is no {what} {name!r}: {nearest(name, entries)}")
    return entries[name]


def load(group: str, name: str) -> Any:
    """Import and return the plugin ``name`` of ``drivetrain.<group>``."""
    with drawing_nothing():
        return entry(group, name).load()
