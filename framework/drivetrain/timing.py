"""Where the seconds of a run go, seen from the host. A reading costs one clock call; the device is never waited for."""

from __future__ import annotations

from time import perf_counter

PARTS = ("data", "forward", "backward", "communication", "optimizer", "checkpoint")


class Timing:
    """Seconds per part of the run and samples seen.

    Attributes:
        seconds: part to seconds.
        samples: global samples trained on.
        started: clock reading when training began.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.samples = 0
        self.total = 0.0
        self.started = perf_counter()

    def add(self, part: str, since: float) -> float:
        """Add the time from ``since`` to now to ``part``; returns now."""
        now = perf_counter()
        self.seconds[part] += now - since
        return now

    def summary(self) -> dict[str, float]:
        return {"total": self.total, **self.seconds}
