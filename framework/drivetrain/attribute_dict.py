"""A dictionary whose keys are attributes too: hyper-parameters, and configurations that come back from checkpoints."""

from __future__ import annotations

from typing import Any

from drivetrain.errors import nearest


class AttributeDict(dict[str, Any]):
    """``d.lr`` is ``d["lr"]``; a missing key is answered with the nearest one."""

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"no key {key!r}: {nearest(key, map(str, self))}") from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __repr__(self) -> str:
        """A line for each key, in the order of the alphabet; the values stand below one another."""
        named = {f'"{key}":': self[key] for key in sorted(self, key=str)}
        width = max(map(len, named), default=0)
        return "\n".join(f"{name:<{width}} {value}" for name, value in named.items())

    def __delattr__(self, key: str) -> None:
        del self[key]
