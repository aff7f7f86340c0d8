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

    def __delattr__(self, key: str) -> None:
        del self[key]
