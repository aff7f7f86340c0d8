"""Modules that offer registered plugins by the names of their classes, imported when they are first asked for."""

from __future__ import annotations

from typing import Any

from drivetrain import registry
from drivetrain.errors import nearest

# Of parts that have a class of the same name which keeps Lightning's files and meanings: that is offered by
# drivetrain.lightning.
_FOR_LIGHTNING = "lightning_"


class Offered:
    """What a module offers.

    Args:
        module: the module's name.
        group: registry group, for example ``"callbacks"``.
        own: names that the module has itself.
    """

    def __init__(self, module: str, group: str, own: tuple[str, ...] = ()) -> None:
        self.module, self.group, self.own = module, group, own

    def _registered(self) -> dict[str, str]:
        names = [name for name in registry.names(self.group) if not name.startswith(_FOR_LIGHTNING)]
        return {registry.entry(self.group, name).attr: name for name in names}

    def find(self, name: str) -> Any:
        """For the module's ``__getattr__``."""
        if name == "__all__":  # what a star stands for
            return self.names()
        if name.startswith("__"):  # what Python asks of any module
            raise AttributeError(f"module {self.module!r} has no attribute {name!r}")
        known = self._registered()
        if name not in known:
            raise AttributeError(f"there is no {name!r} in {self.module}: {nearest(name, [*self.own, *known])}")
        return registry.load(self.group, known[name])

    def names(self) -> list[str]:
        """For the module's ``__dir__``."""
        return sorted([*self.own, *self._registered()])
