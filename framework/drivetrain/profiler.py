"""Profiler: what measures named parts of a run. The base class measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Profiler:
    """Contract of profilers, with Lightning's names; override ``start``, ``stop`` and ``summary``.

    Args:
        dirpath: folder for what :meth:`describe` writes.
        filename: file in it; None shows the summary instead.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath = dirpath
        self.filename = filename

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Before a stage."""

    def teardown(self, stage: str | None) -> None:
        """After a stage."""

    def start(self, action_name: str) -> None:
        """``action_name`` begins."""

    def stop(self, action_name: str) -> None:
        """``action_name`` ends."""

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """While it lasts ``action_name`` is measured."""
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def describe(self) -> None:
        """Show or write :meth:`summary`."""

    def summary(self) -> str:
        """What was measured, as text."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        return {}
