"""Throughput over a window of the last updates: what is done per second, on this device and on all together."""

from __future__ import annotations

from collections import deque


class Throughput:
    """Totals go in, rates come out; names of the rates are Lightning's.

    Args:
        available_flops: operations per second that the device can do at most; None where that is not known.
        world_size: devices, which are taken to be alike.
        window_size: updates between which rates are taken, at least 2; before there are so many, there are none.
        separator: in the names.
    """

    def __init__(
        self,
        available_flops: float | None = None,
        world_size: int = 1,
        window_size: int = 100,
        separator: str = "/",
    ) -> None:
        if window_size < 2:
            raise ValueError(f"Throughput(window_size={window_size}): a rate needs at least two updates.")
        self.available_flops, self.world_size, self.separator = available_flops, world_size, separator
        self._totals: dict[str, deque[float]] = {
            name: deque(maxlen=window_size) for name in ("time", "batches", "samples", "lengths")
        }
        self._flops: deque[float] = deque(maxlen=window_size)

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: float | None = None
    ) -> None:
        """Tell the totals so far: seconds, batches, samples and their lengths; ``flops`` of the last batch."""
        given = {"time": time, "batches": batches, "samples": samples, "lengths": lengths}
        for name, value in given.items():
            if value is not None:
                known = self._totals[name]
                if known and value < known[-1]:
                    raise ValueError(f"Throughput: {name} went from {known[-1]} to {value}: give totals, which grow.")
                known.append(value)
        if flops is not None:
            self._flops.append(flops * self.world_size)

    def compute(self) -> dict[str, float]:
        """The last totals, and rates where the window is full."""
        found = {name: values[-1] for name, values in self._totals.items() if values}
        clock = self._totals["time"]
        if not clock or len(clock) < (clock.maxlen or 0) or clock[-1] <= clock[0]:
            return found
        seconds, device = clock[-1] - clock[0], f"device{self.separator}"
        for name, rate in (
            ("batches", "batches_per_sec"),
            ("samples", "samples_per_sec"),
            ("lengths", "items_per_sec"),
        ):
            values = self._totals[name]
            if len(values) == clock.maxlen:
                found[device + rate] = (values[-1] - values[0]) / seconds
                if self.world_size > 1:
                    found[rate] = found[device + rate] * self.world_size
        if len(self._flops) == clock.maxlen:
            flops = (sum(self._flops) - self._flops[0]) / seconds
            if self.world_size > 1:
                found["flops_per_sec"] = flops
            found[f"{device}flops_per_sec"] = flops / self.world_size
            if self.available_flops:
                found[f"{device}mfu"] = flops / self.world_size / self.available_flops
        return found

    def reset(self) -> None:
        for values in (*self._totals.values(), self._flops):
            values.clear()
