"""Classes for services and devices that are not offered: they may be imported, derived from and asked after with
``isinstance``, and no object is made of them.

So they are in Lightning where the service's package or the device is not there. Projects name them for other machines
than the one that they run on, and would not start if the name alone was refused. Nor would those that import a private
name of Lightning's and use it in an annotation, or not at all: such a name is refused where it is used.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from drivetrain.errors import ConfigurationError
from drivetrain.lightning import not_offered

Base = TypeVar("Base")


def refused(module: str, name: str, base: type[Base], /, **members: Any) -> type[Base]:
    """A class derived from ``base`` that says, where an object of it is made, why there is none and what to do instead.

    Args:
        module: module of this package that has it, as in :mod:`not_offered`.
        name: of the class.
        base: what it derives from.
        **members: what can be asked of the class itself.
    """
    why = not_offered.of_name(module, name)

    def refuse(self: Any, *arguments: Any, **options: Any) -> None:
        raise ConfigurationError(f"{name} is not offered: {why}.")

    made: Any = type(base)
    found: type[Base] = made(
        name, (base,), {"__module__": base.__module__, "__doc__": f"Not offered: {why}.", "__init__": refuse, **members}
    )
    return found


class _Inside(type):
    """Of what stands for a private name: a class that is neither called nor derived from."""

    def __call__(cls, *arguments: Any, **options: Any) -> NoReturn:
        raise ConfigurationError(f"{cls.__doc__}, which is not here: use what is public.")


def of_the_inside(path: str) -> type:
    """What stands for ``path``, a private name in one of Lightning's modules: it may be imported and asked after with
    ``isinstance``.

    Raises:
        ConfigurationError: later, where it is called or derived from.
    """
    module, _, name = path.rpartition(".")

    def refuse(cls: type) -> NoReturn:
        raise ConfigurationError(f"{cls.__bases__[0].__doc__}, which is not here: derive from what is public.")

    members = {
        "__module__": module,
        "__doc__": f"{path} is a part of Lightning's inside",
        "__init_subclass__": classmethod(refuse),
    }
    return _Inside(name, (), members)
