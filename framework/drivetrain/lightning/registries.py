"""Accelerators and strategies by name, where projects add theirs when they are imported.

Most never use what they add: a package registers its accelerator for one vendor's devices and trains on another's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.errors import ConfigurationError, nearest


class Registry(dict[str, dict[str, Any]]):
    """What a name makes, with a description and the arguments that it is made with.

    Args:
        kind: what is kept, ``"accelerator"`` or ``"strategy"``; the key of the class in each entry.
        own: drivetrain's names, and the class and its arguments that each stands for.
    """

    def __init__(self, kind: str, own: Mapping[str, tuple[Callable[..., Any], Mapping[str, Any]]]) -> None:
        super().__init__()
        self._kind = kind
        for name, (made, arguments) in own.items():
            self.register(name, made, **arguments)
        self._own = dict(self)

    def register(
        self,
        name: str,
        made: Callable[..., Any] | None = None,
        description: str = "",
        override: bool = False,
        **init_params: Any,
    ) -> Callable[..., Any]:
        """Let ``name`` make an object of the class ``made``; without one, a decorator of the class.

        Raises:
            ConfigurationError: the name is taken, and ``override`` is False.
        """
        made = init_params.pop(self._kind, made)  # Lightning's name of the argument
        if name in self and not override:
            raise ConfigurationError(f"the {self._kind} {name!r} is registered already: give override=True.")

        def keep(made: Callable[..., Any]) -> Callable[..., Any]:
            self[name] = {
                "description": description,
                "init_params": init_params,
                self._kind: made,
                f"{self._kind}_name": name,
            }
            return made

        return keep if made is None else keep(made)

    def get(self, name: str, default: Any = None) -> Any:
        """An object of what ``name`` makes, or ``default``.

        Raises:
            KeyError: there is no such name, and no default.
        """
        if name in self:
            entry = self[name]
            return entry[self._kind](**entry["init_params"])
        if default is None:
            raise KeyError(f"there is no {self._kind} {name!r}: {nearest(name, self)}")
        return default

    def remove(self, name: str) -> None:
        self.pop(name)

    def meant_by(self, asked: Any) -> Any:
        """What a project registered under the name ``asked``, made now; whatever else is asked for, itself."""
        added = isinstance(asked, str) and asked in self and self[asked] is not self._own.get(asked)
        return self.get(asked) if added else asked

    def __str__(self) -> str:
        return f"{self._kind}: {', '.join(self)}"


class Accelerators(Registry):
    def available_accelerators(self) -> set[str]:
        return set(self)


class Strategies(Registry):
    def available_strategies(self) -> list[str]:
        return list(self)
