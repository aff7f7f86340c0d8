"""Modules that may be called as the one function that they are named after: ``check``, ``simulate``, ``calibrate``.

``from drivetrain.comm import check`` gives the module of this name, as imports do, and whoever writes that wants to
call it. ``drivetrain.comm.check.check`` is the same function.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """What such a module makes its class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[self.__name__.rpartition(".")[2]](*args, **kwargs)
