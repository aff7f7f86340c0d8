"""SimpleProfiler: how often each action ran and how long it took."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from pathlib import Path

from drivetrain.profiler import Profiler


class SimpleProfiler(Profiler):
    """Seconds of each action: mean and total, with ``extended`` also the calls and the share of the whole time.

    Args:
        dirpath, filename: see :class:`~drivetrain.profiler.Profiler`.
        extended: whether the report has all columns.

    Attributes:
        recorded_durations: seconds of each call by action.

    Raises:
        ValueError: an action is started twice, or stopped without a start.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.current_actions: dict[str, float] = {}
        self.recorded_durations: dict[str, list[float]] = defaultdict(list)
        self.start_time = time.perf_counter()

    def start(self, action_name: str) -> None:
        if action_name in self.current_actions:
            raise ValueError(f"the action {action_name} has been started already: stop it first.")
        self.current_actions[action_name] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        end = time.perf_counter()
        begun = self.current_actions.pop(action_name, None)
        if begun is None:
            raise ValueError(f"the action {action_name} is stopped and was never started.")
        self.recorded_durations[action_name].append(end - begun)

    def summary(self) -> str:
        title = f"{self._stage.upper()} Profiler Report" if self._stage else "Profiler Report"
        whole = time.perf_counter() - self.start_time
        sums = {action: math.fsum(seconds) for action, seconds in self.recorded_durations.items()}
        rows: list[tuple[str, ...]]
        if self.extended:
            header: tuple[str, ...] = ("Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %")
            calls = sum(len(seconds) for seconds in self.recorded_durations.values())
            rows = [("Total", "-", str(calls), f"{whole:.5}", "100 %")]
            for action in sorted(sums, key=lambda name: -sums[name]):
                n, total = len(self.recorded_durations[action]), sums[action]
                rows.append((action, f"{total / n:.5}", str(n), f"{total:.5}", f"{100 * total / whole:.5}"))
        else:
            header = ("Action", "Mean duration (s)", "Total time (s)")
            means = {action: total / len(self.recorded_durations[action]) for action, total in sums.items()}
            ordered = sorted(means, key=lambda name: -means[name])
            rows = [(action, f"{means[action]:.5}", f"{sums[action]:.5}") for action in ordered]
        return f"{title}\n\n{_table(header, rows)}\n"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "|  " + "  |  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) + "  |"
        for row in [header, *rows]
    ]
    rule = "-" * len(lines[0])
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])
