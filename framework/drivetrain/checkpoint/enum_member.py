"""A member of an Enum by its name: looked up in what the reader's program defines, without running or importing any."""

from __future__ import annotations

import enum
import operator
import sys
from collections.abc import Mapping
from functools import reduce
from types import ModuleType
from typing import Any


def name_of(member: enum.Enum) -> dict[str, Any]:
    """Where the class of ``member`` is found, and the name it has there; of a flag those of its bits."""
    bits = list(member) if isinstance(member, enum.Flag) else [member]
    kind = type(member)
    return {"module": kind.__module__, "class": kind.__qualname__, "names": [bit.name for bit in bits]}


def find(module: str, qualified_name: str, names: list[str], value: Any) -> Any:
    """The member, where a class of that name is there and gives it this ``value``; else ``value``.

    A file from elsewhere may name anything: classes are looked up in the dictionaries of imported modules, past every
    ``__getattr__``, and members in that of their class.
    """
    if not isinstance(names, list) or not all(isinstance(one, str) for one in (module, qualified_name, *names)):
        return value
    found: Any = sys.modules.get(module)
    for part in qualified_name.split("."):
        found = _defined_in(found).get(part)
    if not issubclass(type(found), enum.EnumType) or not names:
        return value
    members = [type.__getattribute__(found, "_member_map_").get(name) for name in names]
    if any(member is None for member in members):
        return value
    member = reduce(operator.or_, members) if len(members) > 1 else members[0]
    return member if (member.value == value) is True else value  # an array says it of each of its elements


def _defined_in(owner: Any) -> Mapping[str, Any]:
    """What a module or a class has in its dictionary: asked past its own ways to look names up, which for a module that
    is imported on demand would run it."""
    if issubclass(type(owner), ModuleType):
        return object.__getattribute__(owner, "__dict__")
    return type.__getattribute__(owner, "__dict__") if issubclass(type(owner), type) else {}
