"""``python -m drivetrain.comm calibrate`` and ``predict``: what collectives take here, measured, kept and read back."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from drivetrain.comm import measure
from drivetrain.comm.arguments import require_whole, require_whole_list
from drivetrain.comm.calibration import NATIVE, Calibration, needed, place
from drivetrain.comm.callable_module import CallableModule
from drivetrain.comm.command import Parser, integers, topologies
from drivetrain.comm.cost import bus_bandwidth
from drivetrain.comm.schedules import topology
from drivetrain.comm.units import parse_size, shown_rate, shown_size, shown_time
from drivetrain.command_line import require_writable
from drivetrain.errors import ConfigurationError
from drivetrain.launch import current_job

SIZES = tuple(2**exponent for exponent in range(10, 27, 2))  # 1 KiB to 64 MiB
REPEATS, SECONDS = 21, 3.0
BUSY = 0.5  # load for each core, before anything is measured, from which times are those of a busy machine


def request(
    device: str = "cpu",
    names: Sequence[str] | None = None,
    sizes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
    seconds: float = SECONDS,
) -> measure.Request:
    """What a calibration measures on each number of ranks.

    Args:
        device: ``"cpu"`` (Gloo) or ``"cuda"`` (NCCL).
        names: topologies; all that are registered where nothing is given.
        sizes: of the tensors in bytes.
        repeats: timings of each at most.
        seconds: for each size, about.

    Raises:
        ConfigurationError: a topology is unknown.
    """
    for name in names or ():
        topology(name)
    if device not in ("cpu", "cuda"):
        raise ConfigurationError(f"device={device!r} cannot be measured: pass 'cpu' (Gloo) or 'cuda' (NCCL).")
    chosen = (NATIVE, *(topologies(None) if names is None else names))
    return measure.Request(measure.all_reduces, chosen, tuple(sizes), repeats, seconds, device)


def fitted(measured: Sequence[measure.Measured]) -> Calibration:
    """The calibration from what :func:`request` measured."""
    return Calibration.of({one.hosts: by_algorithm(one.samples) for one in measured})


def calibrate(
    workers: Sequence[int] = (2, 4),
    device: str = "cpu",
    *,
    names: Sequence[str] | None = None,
    sizes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
    seconds: float = SECONDS,
) -> Calibration:
    """Measure the all-reduces of this machine and fit the cost model to them; ``save(place(device))`` keeps it.

    In a job its own ranks are measured, all of which call; else processes that are started for it, so a script calls
    this under ``if __name__ == "__main__":``.

    Args:
        workers: numbers of ranks, of 2 or more; a job has its own.
        device, names, sizes, repeats, seconds: as :func:`request` takes them.

    Raises:
        ConfigurationError: a topology is unknown, a number is too small, or there are fewer GPUs than ranks.
        MeasurementError: a rank failed.
    """
    require_whole_list("workers", workers, "[2, 4]")
    for count in workers:
        require_whole("workers", count, 2)
    require_whole("repeats", repeats)
    measure.require_amount(repeats, seconds)
    wanted = [request(device, names, sizes, repeats, seconds)]
    job = current_job()
    if job is not None and job.world_size > 1:
        return fitted(measure.measure_here(wanted))
    measure.require_room(wanted, max(workers, default=2))
    return fitted([one for count in sorted(set(workers)) for one in measure.measure(wanted, count)])


def by_algorithm(samples: Sequence[measure.Sample]) -> dict[str, dict[float, float]]:
    """Seconds by size in bytes, by algorithm."""
    times: dict[str, dict[float, float]] = {}
    for sample in samples:
        times.setdefault(sample.operation, {})[float(sample.size_bytes)] = sample.seconds
    return times


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
    made.add_argument("--repeats", type=int, default=REPEATS, help=f"timings of each at most ({REPEATS})")
    made.add_argument("--seconds", type=float, default=SECONDS, help="for each size and number of ranks, about (3)")
    made.add_argument("--output", type=Path, metavar="FILE", help="instead of this user's own place for it")
    return made


def calibrate_main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    arguments = calibrate_parser().parse_args(list(argv))
    measure.require_amount(arguments.repeats, arguments.seconds, "--")
    sizes = SIZES if arguments.sizes is None else sizes_of(arguments.sizes)
    workers = sorted(set(integers(arguments.workers, "--workers", 2)))
    path = arguments.output or place(arguments.device)
    require_writable(path, "--output")
    chosen = topologies(arguments.topologies)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    made = calibrate(
        workers, arguments.device, names=chosen, sizes=sizes, repeats=arguments.repeats, seconds=arguments.seconds
    )
    job = current_job()
    if job is not None and job.rank > 0:
        return 0
    made.save(path)
    print(f"{_described(made)}\nwritten to {path}")
    if load > BUSY * cores:
        busy = f"others used the machine (load {load:.1f} on {cores} cores when this began)"
        print(f"{busy}: calibrate again when it is quiet, or auto chooses by noise", file=sys.stderr)
    return 0


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
    made = needed(arguments.device) if arguments.model is None else Calibration.load(arguments.model)
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


sys.modules[__name__].__class__ = CallableModule
