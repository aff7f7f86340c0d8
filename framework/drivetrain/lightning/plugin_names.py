"""Class names of Lightning that stand for registered plugins, loaded when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from drivetrain import registry


def finder(module: str, group: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__``.

    Args:
        module: name of the module that has it.
        group: registry group, for example ``"callbacks"``.
        names: registered name by class name.
    """

    def find(name: str) -> Any:
        if name in names:
            if names[name] not in registry.names(group):
                raise AttributeError(
                    f"{module}.{name}: no installed package registers {names[name]!r} under drivetrain.{group}:"
                    " install the one that does."
                )
            return registry.load(group, names[name])
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find
