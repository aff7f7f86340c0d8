"""Which checkpoints a callback has saved that a logger has not sent yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def unsent_checkpoints(
    checkpoint_callback: Any, logged_model_time: dict[str, float]
) -> list[tuple[float, str, Any, str]]:
    """The checkpoints of a callback that are not in ``logged_model_time``, or are newer than there, oldest first.

    Args:
        checkpoint_callback: what saves them.
        logged_model_time: when each path that was sent had been written, seconds since the epoch of the clock.

    Returns:
        ``(time, path, score, what)`` of each, the last one ``"latest"``, ``"best"`` or ``"best_k"``.
    """
    found: dict[str, tuple[Any, str]] = {}
    for path, score, what in (
        ("last_model_path", "current_score", "latest"),
        ("best_model_path", "best_model_score", "best"),
    ):
        if getattr(checkpoint_callback, path, ""):
            found[getattr(checkpoint_callback, path)] = getattr(checkpoint_callback, score, None), what
    for path, score in getattr(checkpoint_callback, "best_k_models", {}).items():
        found[path] = score, "best_k"
    timed = [(Path(path).stat().st_mtime, path, *known) for path, known in found.items() if Path(path).exists()]
    fresh = (item for item in timed if logged_model_time.get(item[1], -1.0) < item[0])
    return sorted(fresh, key=lambda item: item[:2])
