"""The figure of ``python -m drivetrain.bench comm``: times, bus bandwidths and ratios over the size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain_plugins.bench.comm import Row


def plot(rows: Sequence[Row], path: Path) -> None:
    """A row of three axes for each number of ranks, as an image; dashed: predicted times.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    worlds = list(dict.fromkeys(row.hosts for row in rows))
    figure = Figure(figsize=(14, 4 * len(worlds)), layout="constrained")
    grid = figure.subplots(len(worlds), 3, squeeze=False)
    for hosts, (times, speeds, ratios) in zip(worlds, grid, strict=True):
        here = [row for row in rows if row.hosts == hosts]
        for number, name in enumerate(dict.fromkeys(row.algorithm for row in here)):
            line = [row for row in here if row.algorithm == name]
            sizes = [row.size_bytes / 1e6 for row in line]
            color = f"C{number}"
            times.plot(sizes, [row.seconds * 1e3 for row in line], marker="o", color=color, label=name)
            known = [row for row in line if row.predicted is not None]
            megabytes = [row.size_bytes / 1e6 for row in known]
            times.plot(megabytes, [1e3 * (row.predicted or 0.0) for row in known], "--", color=color, alpha=0.6)
            speeds.plot(sizes, [row.bus_bandwidth / 1e9 for row in line], marker="o", color=color)
            compared = [row for row in line if row.ratio is not None]
            megabytes = [row.size_bytes / 1e6 for row in compared]
            ratios.plot(megabytes, [row.ratio for row in compared], marker="o", color=color)
        for axes, what in ((times, "time (ms)"), (speeds, "bus bandwidth (GB/s)"), (ratios, "time over native's")):
            axes.set(xscale="log", yscale="log", xlabel="size (MB)", ylabel=what)
            axes.grid(alpha=0.3)
        times.set_title(f"{here[0].operation} on {sum(hosts)} ranks")
        times.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot write the plot to {path}: {error}: name another file.") from error
