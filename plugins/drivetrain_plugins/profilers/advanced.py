"""AdvancedProfiler: which functions each action spends its time in, by Python's own profiler."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigurationError
from drivetrain.profiler import Profiler


class AdvancedProfiler(Profiler):
    """A table of functions for each action.

    Python's profiler watches one action at a time: while an action runs within another, the time is the inner one's.

    Args:
        dirpath, filename: see :class:`~drivetrain.profiler.Profiler`.
        line_count_restriction: rows of each table, or a fraction of them.
        dump_stats: also write what ``pstats`` reads, a file ``....prof`` for each action, to ``dirpath``.

    Raises:
        ValueError: an action is stopped that was never started.
        ConfigurationError: ``dump_stats`` without a folder to write to.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        self._running: list[str] = []  # the outermost first

    def start(self, action_name: str) -> None:
        if self._running:
            self.profiled_actions[self._running[-1]].disable()
        self._running.append(action_name)
        self.profiled_actions.setdefault(action_name, cProfile.Profile()).enable()

    def stop(self, action_name: str) -> None:
        if action_name not in self._running:
            raise ValueError(f"the action {action_name} is stopped and was never started.")
        self.profiled_actions[self._running[-1]].disable()
        self._running.reverse()
        self._running.remove(action_name)  # the innermost of that name
        self._running.reverse()
        if self._running:
            self.profiled_actions[self._running[-1]].enable()

    def summary(self) -> str:
        stats = {}
        for action, profile in self.profiled_actions.items():
            if self.dump_stats:
                self._dump(action, profile)
            text = io.StringIO()
            found = pstats.Stats(profile, stream=text) if profile.getstats() else None
            if found is not None:
                found.strip_dirs().sort_stats("cumulative").print_stats(self.line_count_restriction)
            stats[action] = text.getvalue()
        return self._stats_to_str(stats)

    def _dump(self, action: str, profile: cProfile.Profile) -> None:
        if not self.dirpath:
            raise ConfigurationError("AdvancedProfiler(dump_stats=True) has no folder to write to: set dirpath.")
        os.makedirs(self.dirpath, exist_ok=True)
        profile.dump_stats(os.path.join(self.dirpath, self._prepare_filename(action, ".prof")))

    def teardown(self, stage: str | None) -> None:
        self.profiled_actions.clear()
        self._running.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "profiled_actions": {}, "_running": []}
