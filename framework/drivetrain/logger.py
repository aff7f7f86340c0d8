"""Logger: where metrics and hyper-parameters are written. Exists on every worker, writes on the first only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Logger:
    """Base class. Files are opened on the first write, never in the constructor (a fork may come between)."""

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def version(self) -> str | int | None:
        return None

    @property
    def log_dir(self) -> Path | None:
        """Folder that this logger writes to, if it does."""
        return None

    @property
    def experiment(self) -> Any:
        """The object of the underlying library, for what this contract does not cover."""
        return None

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars at ``step`` (optimizer steps done). Called on the first worker only."""

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Write hyper-parameters, with the final metrics where they are known."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """A checkpoint callback has saved. Called on the first worker only, by callbacks with Lightning's rules."""

    def save(self) -> None:
        """Flush to disk."""

    def finalize(self, status: str) -> None:
        """Close; ``status`` is ``"completed"``, ``"stopped"``, ``"interrupted"`` or ``"failed"``."""
