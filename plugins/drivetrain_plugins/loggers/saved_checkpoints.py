"""What a logger says of a checkpoint that it sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_DESCRIBED = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only", "_every_n_train_steps")


def description(callback: Any, path: str, score: Any, kind: str | None = None) -> dict[str, Any]:
    """What is known of a checkpoint, as plain data; the callback's settings under ``kind``, by default its class."""
    settings = {name: getattr(callback, name) for name in _DESCRIBED if hasattr(callback, name)}
    return {
        "score": getattr(score, "item", lambda: score)(),  # a number: a step stays a whole one
        "original_filename": Path(path).name,
        kind or type(callback).__name__: {name: _plain(value) for name, value in settings.items()},
    }


def aliases(callback: Any, path: str) -> list[str]:
    return ["latest", "best"] if path == getattr(callback, "best_model_path", None) else ["latest"]


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
