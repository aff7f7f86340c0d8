"""Where the seconds of a run go, seen from the host; the device is never waited for.

Reading the clock six times costs a tenth of a very short step, so of short steps one in ``stride`` is timed and counts
for all of them.
"""

from __future__ import annotations

from time import perf_counter

_SHORT = 0.01  # seconds
PARTS = ("data", "forward", "backward", "communication", "optimizer", "checkpoint")


class Timing:
    """Seconds per part of the run and samples seen.

    Attributes:
        seconds: part to seconds.
        samples: global samples trained on.
        stride: of so many steps one is timed.
        on: whether the step at hand is timed.
        started: clock reading when training began.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.samples = 0
        self.stride = 1
        self.on = True
        self.total = 0.0
        self.started = perf_counter()

    def begin_step(self, step: int, per_step: float | None = None) -> None:
        """Decide whether step number ``step`` is timed; ``per_step`` seconds choose the stride anew."""
        if per_step is not None:
            self.stride = 1 if per_step > _SHORT else 16
        self.on = step % self.stride == 0

    def add_sampled(self, part: str, since: float) -> float:
        """:meth:`add` for a part of a timed step, standing for its whole stride."""
        now = perf_counter()
        self.seconds[part] += (now - since) * self.stride
        return now

    def add(self, part: str, since: float) -> float:
        """Add the time from ``since`` to now to ``part``; returns now."""
        now = perf_counter()
        self.seconds[part] += now - since
        return now

    def summary(self) -> dict[str, float]:
        return {"total": self.total, **self.seconds}
