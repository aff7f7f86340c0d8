"""``python -m drivetrain.comm calibrate`` and ``predict``: what collectives take here, measured, kept and read back."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from drivetrain.comm import measure
from drivetrain.comm.calibration import NATIVE, Calibration, Hosts, place, stored
from drivetrain.comm.command import Parser, integers, topologies
from drivetrain.comm.cost import bus_bandwidth
from drivetrain.comm.units import parse_size, shown_rate, shown_size, shown_time
from drivetrain.errors import ConfigurationError

SIZES = (1024, 8192, 65536, 2**19, 2**22, 2**24, 2**26)


def calibrate(
    workers: Sequence[int],
    device: str = "cpu",
    names: Sequence[str] | None = None,
    sizes: Sequence[int] = SIZES,
    repeats: int = 11,
    seconds: float = 2.0,
) -> Calibration | None:
    """Measure the transport's own all-reduce and the topologies, and fit the model.

    Args:
        workers: numbers of ranks, on processes of this machine; ``()``: the ranks of the job this process is in.
        device: ``"cpu"`` (Gloo) or ``"cuda"`` (NCCL).
        names: topologies; all that are registered where nothing is given.
        sizes: of the tensors in bytes.
        repeats: timings of each at most.
        seconds: for each size, about.

    Returns:
        None on ranks of a job other than 0.

    Raises:
        ConfigurationError: a topology is unknown, or there are fewer GPUs than ranks.
        MeasurementError: a rank failed.
    """
    chosen = (NATIVE, *(topologies(None) if names is None else names))
    request = measure.Request(measure.all_reduces, chosen, tuple(sizes), repeats, seconds, device)
    if workers:
        found = [measure.measure(request, count) for count in workers]
    else:
        here = measure.measure_here(request)
        if here is None:
            return None
        found = [here]
    return Calibration.of({one.hosts: by_algorithm(one.samples) for one in found})


def by_algorithm(samples: Sequence[measure.Sample]) -> dict[str, dict[float, float]]:
    """Seconds by size in bytes, by algorithm."""
    times: dict[str, dict[float, float]] = {}
    for sample in samples:
        times.setdefault(sample.operation, {})[float(sample.size_bytes)] = sample.seconds
    return times


def misses(calibration: Calibration, measured: Mapping[Hosts, Mapping[str, Mapping[float, float]]]) -> list[float]:
    """By how much the bare model, uncorrected, misses each measured time of a topology, relative to it."""
    found = []
    for hosts, algorithms in measured.items():
        for name, times in algorithms.items():
            for size, took in times.items():
                predicted = calibration.predict(name, size, hosts, corrected=False)
                if name != NATIVE and predicted is not None:
                    found.append(abs(predicted - took) / took)
    return found


# -- the commands ---------------------------------------------------------------------------------------------------
def calibrate_parser() -> Parser:
    made = Parser(
        prog="python -m drivetrain.comm calibrate",
        description="Measure the all-reduces of this machine (or, under torchrun, of the job) and fit the cost model"
        " that algorithm='auto' and strategy.topology=auto choose by.",
    )
    made.add_argument("--workers", default="2,4", help="numbers of ranks to measure here (2,4); a job has its own")
    made.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cpu: Gloo; cuda: NCCL, one GPU per rank"
    )
    made.add_argument("--topologies", metavar="NAME,...", help="only these (default: all)")
    made.add_argument(
        "--sizes", metavar="SIZE,...", help="of the tensors, for example 4KB,1MB (default: 1 KiB to 64 MiB)"
    )
    made.add_argument("--repeats", type=int, default=11, help="timings of each at most (11)")
    made.add_argument("--seconds", type=float, default=2.0, help="for each size and number of ranks, about (2)")
    made.add_argument("--output", type=Path, metavar="FILE", help="instead of this user's own place for it")
    return made


def calibrate_main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    arguments = calibrate_parser().parse_args(list(argv))
    if arguments.repeats < 1 or not arguments.seconds > 0:
        raise ConfigurationError("--repeats and --seconds must be above zero.")
    sizes = SIZES if arguments.sizes is None else sizes_of(arguments.sizes)
    workers = () if in_job() else sorted(set(integers(arguments.workers, "--workers", 2)))
    names = None if arguments.topologies is None else topologies(arguments.topologies)
    made = calibrate(workers, arguments.device, names, sizes, arguments.repeats, arguments.seconds)
    if made is None:
        return 0
    path = arguments.output or place(arguments.device)
    made.save(path)
    print(f"{_described(made)}\nwritten to {path}")
    return 0


def in_job() -> bool:
    """Whether this process is one of several workers that a launcher started."""
    from drivetrain.launch import current_job

    job = current_job()
    return job is not None and job.world_size > 1


def sizes_of(text: str) -> list[int]:
    """Comma-separated sizes.

    Raises:
        ConfigurationError: one is no size.
    """
    return sorted({round(parse_size(word)) for word in text.split(",")})


def _described(made: Calibration) -> str:
    lines = []
    for hosts, world in made.worlds.items():
        model = world.model
        links = [("inside a host", model.inside), ("between hosts", model.between)]
        shown = [
            f"{kind} {shown_time(link.latency)} and {_rate(link.seconds_per_byte)}"
            for kind, link in links
            if link is not None and (kind == "inside a host" or len(hosts) > 1)
        ]
        deviations = [abs(1 - 1 / value) for curve in world.corrections.values() for value in curve.values]
        lines.append(
            f"{sum(hosts)} ranks on {len(hosts)} host{'s' if len(hosts) > 1 else ''}: {', '.join(shown)}, "
            f"adds {_rate(model.reduction)}; the model alone misses by {statistics.median(deviations):.0%} (median)"
        )
    return "\n".join(lines)


def _rate(seconds_per_byte: float) -> str:
    return shown_rate(1 / seconds_per_byte) if seconds_per_byte else "no time per byte"


def predict_parser() -> Parser:
    made = Parser(
        prog="python -m drivetrain.comm predict",
        description="What each all-reduce should take by the calibration, and which one algorithm='auto' takes.",
    )
    made.add_argument("--size", required=True, help="of the tensor: 25MB")
    made.add_argument("--workers", default="4", help="numbers of ranks on one host (4)")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose calibration to read (cpu)")
    made.add_argument("--model", type=Path, metavar="FILE", help="another calibration file")
    made.add_argument("--json", action="store_true", help="print JSON, times in seconds")
    return made


def predict_main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    arguments = predict_parser().parse_args(list(argv))
    made = stored(arguments.device) if arguments.model is None else Calibration.load(arguments.model)
    if made is None:
        raise ConfigurationError(
            f"there is no calibration at {place(arguments.device)}: run python -m drivetrain.comm calibrate first."
        )
    size = parse_size(arguments.size)
    rows: list[_Row] = []
    for workers in integers(arguments.workers, "--workers", 2):
        chosen = made.choose(round(size), (workers,))
        for name in (NATIVE, *topologies(None)):
            seconds = made.predict(name, size, (workers,))
            if seconds is not None:
                rows.append(_Row(workers, name, seconds, name == chosen))
    if arguments.json:
        print(json.dumps({"size_bytes": size, "predictions": [row._asdict() for row in rows]}, indent=2))
        return 0
    print(f"an all-reduce of {shown_size(size)}; * is what auto takes")
    for row in rows:
        speed = shown_rate(bus_bandwidth("all_reduce", row.workers, size, row.seconds))
        name = f"{row.algorithm}{' *' if row.chosen else ''}"
        print(f"{row.workers:4} ranks  {name:<22} {shown_time(row.seconds):>9}  {speed}")
    return 0


class _Row(NamedTuple):
    workers: int
    algorithm: str
    seconds: float
    chosen: bool
