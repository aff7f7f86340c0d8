"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "note", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """What was looked at and what was found.

    Attributes:
        part: heading under which it is shown.
        name: what was looked at.
        state: ``fail`` where training cannot work, ``warn`` where it may fail or be slow, ``note`` for what is
            optional and absent, else ``ok``.
        found: a few words.
        fix: what to do about it, in one line; empty where nothing need be done.
        figures: the measured numbers, by name and unit.
    """

    part: str
    name: str
    state: State
    found: str
    fix: str = ""
    figures: dict[str, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return asdict(self)
