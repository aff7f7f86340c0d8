"""``python -m drivetrain.comm scale``: predicted times and bus bandwidths of the topologies at many sizes of job."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.comm import schedules
from drivetrain.comm.command import Parser, add_plot, integers, plot_place, topologies
from drivetrain.comm.cost import CostModel, Link, bus_bandwidth, profile
from drivetrain.comm.units import parse_bandwidth, parse_size, parse_time, shown_rate, shown_size, shown_time
from drivetrain.errors import ConfigurationError


@dataclass(frozen=True)
class Prediction:
    """What one topology should take at one number of workers: seconds, and bus bandwidth in bytes per second."""

    topology: str
    workers: int
    rounds: int
    seconds: float
    bus_bandwidth: float


def on_hosts(workers: int, per_host: int) -> list[int]:
    """Full hosts, and the rest on one more."""
    return [per_host] * (workers // per_host) + [workers % per_host] * (workers % per_host > 0)


def predictions(
    names: Sequence[str], workers: Sequence[int], size_bytes: float, model: CostModel, per_host: int | None = None
) -> list[Prediction]:
    """Every topology at every number of workers, for an all-reduce of ``size_bytes``.

    Raises:
        ConfigurationError: a topology is unknown or cannot be made for a number of workers.
    """
    made = []
    for count in workers:
        hosts = None if per_host is None else on_hosts(count, per_host)
        for name in names:
            schedule = schedules.make(name, count, hosts)
            seconds = profile(schedule, hosts).seconds(size_bytes, model)
            speed = bus_bandwidth("all_reduce", count, size_bytes, seconds)
            made.append(Prediction(name, count, len(schedule.rounds), seconds, speed))
    return made


def best(found: Sequence[Prediction]) -> dict[int, Prediction]:
    """The fastest at each number of workers."""
    chosen: dict[int, Prediction] = {}
    for one in found:
        if one.workers not in chosen or one.seconds < chosen[one.workers].seconds:
            chosen[one.workers] = one
    return chosen


def parser() -> Parser:
    made = Parser(prog="python -m drivetrain.comm scale", description=__doc__)
    made.add_argument("--workers", required=True, help="numbers of workers, for example 8,64,512,4096")
    made.add_argument("--size", required=True, help="size of the tensor, for example 100MB (10^6) or 100MiB (2^20)")
    made.add_argument("--bandwidth", help="of a host's link to the others, in each direction: 10Gbps, 1.2GB/s")
    made.add_argument("--latency", help="of a message between hosts: 50us")
    made.add_argument("--per-host", type=int, help="workers on a host, which share its link (default 1)")
    made.add_argument("--host-bandwidth", help="between two workers of a host (default: --bandwidth)")
    made.add_argument("--host-latency", help="of a message inside a host (default: --latency)")
    made.add_argument("--reduction", help="bytes that a worker adds in a second: 5GB/s (default: it takes no time)")
    made.add_argument("--model", metavar="FILE", help="a calibrated model instead of bandwidths and latencies")
    made.add_argument("--topologies", metavar="NAME,...", help="only these (default: all)")
    add_plot(made, "time and bus bandwidth over workers")
    made.add_argument("--json", action="store_true", help="print JSON, times in seconds and bandwidths in bytes/s")
    return made


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    arguments = parser().parse_args(list(argv))
    workers = sorted(set(integers(arguments.workers, "--workers")))
    size = parse_size(arguments.size)
    if arguments.per_host is not None and arguments.per_host < 1:
        raise ConfigurationError(f"--per-host {arguments.per_host} leaves no worker on a host: pass 1 or more.")
    if max(workers) == 1:
        if arguments.plot is not None:
            raise ConfigurationError("--plot: one worker alone sends nothing that could be drawn, name more of them.")
        arguments.no_plot = True
    path = plot_place(arguments, f"scale-{shown_size(size).replace(' ', '')}")
    model = _model(
        arguments.model,
        arguments.bandwidth,
        arguments.latency,
        arguments.host_bandwidth,
        arguments.host_latency,
        arguments.reduction,
    )
    found = predictions(topologies(arguments.topologies), workers, size, model, arguments.per_host)
    if arguments.json:
        _print_json(found, size)
    else:
        _print_table(found, size)
    if path is not None:
        plot(found, size, path)
        # Standard output is for the program that reads JSON.
        print(f"plot: {path}", file=sys.stderr if arguments.json else sys.stdout)
    return 0


def _model(
    file: str | None,
    bandwidth: str | None,
    latency: str | None,
    host_bandwidth: str | None,
    host_latency: str | None,
    reduction: str | None,
) -> CostModel:
    if file is not None:
        if any((bandwidth, latency, host_bandwidth, host_latency, reduction)):
            raise ConfigurationError("--model says all bandwidths and latencies: leave the others out.")
        return CostModel.load(file)
    if bandwidth is None or latency is None:
        raise ConfigurationError("scale needs --bandwidth and --latency, for example 10Gbps and 50us, or --model FILE.")
    between = Link.of(parse_time(latency), parse_bandwidth(bandwidth))
    inside = Link.of(parse_time(host_latency or latency), parse_bandwidth(host_bandwidth or bandwidth))
    return CostModel(between, inside, 1 / parse_bandwidth(reduction) if reduction else 0.0)


def _print_json(found: Sequence[Prediction], size: float) -> None:
    rows = [
        {
            "topology": one.topology,
            "workers": one.workers,
            "rounds": one.rounds,
            "seconds": one.seconds,
            "bus_bandwidth": one.bus_bandwidth if one.seconds > 0 else None,
        }
        for one in found
    ]
    chosen = {str(workers): one.topology for workers, one in best(found).items()}
    print(json.dumps({"size_bytes": size, "predictions": rows, "best": chosen}, indent=2, allow_nan=False))


def _print_table(found: Sequence[Prediction], size: float) -> None:
    from rich.console import Console
    from rich.table import Table

    chosen = best(found)
    names = list(dict.fromkeys(one.topology for one in found))
    table = Table(title=f"predicted time (bus bandwidth) of an all-reduce of {shown_size(size)}")
    table.add_column("workers", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("best")
    for workers in chosen:
        cells = {
            one.topology: f"{shown_time(one.seconds)}\n({shown_rate(one.bus_bandwidth)})" if workers > 1 else "nothing"
            for one in found
            if one.workers == workers
        }
        table.add_row(str(workers), *(cells[name] for name in names), chosen[workers].topology)
    # Outside a terminal nothing is as narrow as rich would assume.
    console = Console()
    console = console if console.is_terminal else Console(width=40 + 22 * len(names))
    console.print(table)


def plot(found: Sequence[Prediction], size: float, path: Path) -> None:
    """Time and bus bandwidth over the number of workers, a line per topology, as an image.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, speeds = figure.subplots(1, 2)
    for name in dict.fromkeys(one.topology for one in found):
        line = [one for one in found if one.topology == name and one.workers > 1]
        workers = [one.workers for one in line]
        times.plot(workers, [one.seconds * 1e3 for one in line], marker="o", label=name)
        speeds.plot(workers, [one.bus_bandwidth / 1e9 for one in line], marker="o", label=name)
    for axes, what in ((times, "time (ms)"), (speeds, "bus bandwidth (GB/s)")):
        axes.set(xscale="log", yscale="log", xlabel="workers", ylabel=what)
        axes.set_xticks(sorted({one.workers for one in found if one.workers > 1}), minor=False)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.xaxis.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.grid(alpha=0.3)
    times.legend()
    figure.suptitle(f"predicted all-reduce of {shown_size(size)}")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot write the plot to {path}: {error}: name another file.") from error
