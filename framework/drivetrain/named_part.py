"""A callback, logger, ... made of its registered name and arguments, which are looked at before anything is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain import registry
from drivetrain.errors import ConfigurationError, nearest


def named(group: str, name: str, arguments: Mapping[str, Any], usual: Mapping[str, Any]) -> Any:
    """The part that is registered as ``name`` in ``group``, made with ``arguments``.

    Args:
        usual: arguments given where the class takes them and ``arguments`` does not hold them.

    Raises:
        ConfigurationError: there is no such part, or it does not take these arguments, or wants others.
    """
    kind = registry.load(group, name)
    taken = inspect.signature(kind).parameters
    given = {**{one: value for one, value in usual.items() if one in taken}, **arguments}
    accepts(kind, given, f"{group} {name!r}")
    return called(kind, given, f"{group} {name!r}")


def accepts(factory: Callable[..., Any], arguments: Mapping[str, Any], what: str) -> None:
    """Raise :class:`ConfigurationError` for an argument that ``factory`` does not take."""
    parameters = inspect.signature(factory).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in arguments:
        if name not in parameters:
            raise ConfigurationError(f"{what} takes no argument {name!r}: {nearest(name, parameters)}")


def called(factory: Callable[..., Any], arguments: Mapping[str, Any], what: str) -> Any:
    """``factory(**arguments)``; :class:`ConfigurationError` where they do not fit."""
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ConfigurationError(f"{what}: {error}") from error
    return factory(**arguments)
