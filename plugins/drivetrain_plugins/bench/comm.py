"""Collectives on real ranks: every algorithm against the transport's own, and predicted times next to measured ones.

Repeats are interleaved and medians of the slowest rank's time; on a machine that others use they say little, so the
load is shown too. Under torchrun the ranks of the job are measured; else processes of this machine, one GPU each with
--device cuda. The defaults take a minute or two: all-reduces on 2 and 4 ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain.comm import measure, schedules
from drivetrain.comm.calibrate import fitted, request, sizes_of
from drivetrain.comm.calibration import NATIVE, Calibration, Hosts, stored
from drivetrain.comm.command import Parser, add_plot, integers, plot_place
from drivetrain.comm.cost import bus_bandwidth, predict
from drivetrain.comm.schedule import Schedule
from drivetrain.comm.units import shown_rate, shown_size, shown_time
from drivetrain.errors import ConfigurationError, nearest
from drivetrain.launch import current_job
from drivetrain_plugins.bench.comm_figure import plot

if TYPE_CHECKING:
    import torch

    from drivetrain.comm.communicator import Communicator

Topology = Callable[..., Schedule]
# What else than an all-reduce has a schedule, by kind.
OTHERS: dict[str, dict[str, Topology]] = {
    "reduce_scatter": {"ring": schedules.ring, "halving_doubling": schedules.halving_doubling},
    "all_gather": {"ring": schedules.ring, "halving_doubling": schedules.halving_doubling},
    "broadcast": {"tree": schedules.tree, "chain": schedules.chain},
    "reduce": {"tree": schedules.tree, "chain": schedules.chain},
}
OPERATIONS = ("all_reduce", *OTHERS)
SEGMENTED, TUNED = "ring in {} segments", "ring of {} thread blocks"
NEAR = 1.1  # auto is right where it takes at most so many times what the best choice took


@dataclass(frozen=True)
class Row:
    """One operation by one algorithm at one size.

    Attributes:
        seconds: median over the repeats of the slowest rank's time; ``least``: the shortest.
        algorithm_bandwidth: bytes of the tensor per second; ``bus_bandwidth``: times the factor of nccl-tests.
        ratio: of ``seconds`` to the transport's own.
        predicted: seconds by the calibration; None for what it does not know.
        modelled: the same by the fitted model alone, without measured deviations.
        chosen: whether ``algorithm="auto"`` takes it.
    """

    operation: str
    algorithm: str
    workers: int
    hosts: Hosts
    size_bytes: int
    seconds: float
    least: float
    repeats: int
    algorithm_bandwidth: float
    bus_bandwidth: float
    ratio: float | None
    predicted: float | None
    modelled: float | None
    chosen: bool


# -- what is measured -----------------------------------------------------------------------------------------------
def operations(comm: Communicator, names: Sequence[str]) -> dict[str, measure.Operation]:
    """The operations named ``operation/algorithm``, on the ranks of ``comm``."""
    made: dict[str, measure.Operation] = {}
    for name in names:
        operation, _, algorithm = name.partition("/")
        if operation == "all_reduce" and _has_name(algorithm):
            made[name] = measure.all_reduces(comm, [algorithm])[algorithm]
        elif algorithm == NATIVE:
            made[name] = _native(comm, operation)
        else:
            from drivetrain.comm.execute import Executor

            schedule, blocks = _schedule(operation, algorithm, comm.world_size), _blocks(algorithm)
            own = Executor(schedule, comm) if blocks is None else Executor(schedule, comm, thread_blocks=blocks)
            made[name] = own
    return made


def _has_name(algorithm: str) -> bool:
    """Whether ``algorithm`` is what users call an all-reduce; else it is one that only this sweep makes."""
    return algorithm in (NATIVE, *schedules.names())


def _schedule(operation: str, algorithm: str, workers: int) -> Schedule:
    """What no topology's name stands for."""
    if operation == "all_reduce":
        return schedules.ring(workers, 1 if _blocks(algorithm) is not None else int(algorithm.split()[2]))
    return OTHERS[operation][algorithm](workers, kind=operation)


def _blocks(algorithm: str) -> int | None:
    """How many thread blocks the ring called ``algorithm`` is measured with; None for what is not called by them."""
    return int(algorithm.split()[2]) if algorithm.endswith("thread blocks") else None


def _native(comm: Communicator, operation: str) -> measure.Operation:
    import torch.distributed as dist

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        share = tensor.numel() // comm.world_size
        return tensor[comm.rank * share : (comm.rank + 1) * share]

    own: dict[str, measure.Operation] = {
        "reduce_scatter": lambda tensor: comm.reduce_scatter_flat(mine(tensor), tensor),
        "all_gather": lambda tensor: comm.all_gather_flat(tensor, mine(tensor)),
        "broadcast": partial(dist.broadcast, group=comm.group, group_src=0),
        "reduce": partial(dist.reduce, group=comm.group, group_dst=0),
    }
    return own[operation]


def algorithms(
    operation: str, only: Sequence[str] | None, segments: Sequence[int] = (), blocks: Sequence[int] = ()
) -> list[str]:
    """Of ``operation``, the transport's own first; the all-reduce of a ring in each number of ``segments``, and with
    each number of thread ``blocks``, too."""
    found = schedules.names() if operation == "all_reduce" else list(OTHERS[operation])
    chosen = [NATIVE, *(name for name in found if only is None or name in only)]
    if operation != "all_reduce" or "ring" not in chosen:
        return chosen
    return [*chosen, *map(SEGMENTED.format, segments), *map(TUNED.format, blocks)]


# -- what it comes to -----------------------------------------------------------------------------------------------
def rows_of(measured: measure.Measured, calibration: Calibration) -> Iterator[Row]:
    """The samples with what follows from them."""
    hosts, workers = measured.hosts, sum(measured.hosts)
    own = {
        (sample.operation.partition("/")[0], sample.size_bytes): sample.seconds
        for sample in measured.samples
        if sample.operation.endswith(f"/{NATIVE}")
    }
    for name, size, seconds, least, repeats in measured.samples:
        operation, _, algorithm = name.partition("/")
        predicted, modelled = _predicted(calibration, operation, algorithm, size, hosts)
        native = own.get((operation, size))
        yield Row(
            operation,
            algorithm,
            workers,
            hosts,
            size,
            seconds,
            least,
            repeats,
            size / seconds,
            bus_bandwidth(operation, workers, size, seconds),
            None if native is None else seconds / native,
            predicted,
            modelled,
            operation == "all_reduce" and algorithm == calibration.choose(size, hosts),
        )


def _predicted(
    calibration: Calibration, operation: str, algorithm: str, size: int, hosts: Hosts
) -> tuple[float | None, float | None]:
    if operation == "all_reduce" and _has_name(algorithm):
        modelled = None if algorithm == NATIVE else calibration.predict(algorithm, size, hosts, corrected=False)
        return calibration.predict(algorithm, size, hosts), modelled
    if algorithm == NATIVE:
        return None, None
    world = calibration.worlds.get(hosts)
    schedule = _schedule(operation, algorithm, sum(hosts))
    seconds = predict(schedule, size, calibration.model if world is None else world.model, hosts)
    return seconds, seconds


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Median errors of the predictions, and in how many cells ``auto`` takes what was measured to be best, or nearly.

    A cell is a number of ranks and a size of the all-reduce; what is best is looked for among what has a name.
    """
    cells: dict[tuple[Hosts, int], list[Row]] = {}
    for row in rows:
        if row.operation == "all_reduce" and _has_name(row.algorithm):
            cells.setdefault((row.hosts, row.size_bytes), []).append(row)
    within, lost = 0, []
    for cell in cells.values():
        taken = next((row.seconds for row in cell if row.chosen), None)
        if taken is None:
            continue
        lost.append(taken / min(row.seconds for row in cell))
        within += lost[-1] <= NEAR
    return {
        "median_error": _median_error((row.predicted, row.seconds) for row in rows),
        "median_error_of_the_model": _median_error((row.modelled, row.seconds) for row in rows),
        "auto_within_10_percent": within,
        "auto_cells": len(lost),
        "auto_worst": max(lost, default=None),
    }


def _median_error(pairs: Iterator[tuple[float | None, float]]) -> float | None:
    errors = [abs(predicted - measured) / measured for predicted, measured in pairs if predicted is not None]
    return statistics.median(errors) if errors else None


# -- the command ----------------------------------------------------------------------------------------------------
def parser() -> Parser:
    made = Parser(prog="python -m drivetrain.bench comm", description=__doc__)
    made.add_argument("--operations", default="all_reduce", metavar="NAME,...", help=f"all, or {', '.join(OPERATIONS)}")
    made.add_argument("--algorithms", metavar="NAME,...", help="only these beside the transport's own (default: all)")
    made.add_argument(
        "--segments",
        metavar="N,...",
        help="measure a ring in so many segments too (default: 2,4,8 with --device cuda, where it overlaps its phases)",
    )
    made.add_argument(
        "--thread-blocks",
        metavar="N,...",
        help="with --device cuda: measure a ring of operations of so many thread blocks too (0: NCCL's own number)",
    )
    made.add_argument("--sizes", default="4KB,32KB,256KB,2MB,25MB,100MB", metavar="SIZE,...", help="of the tensors")
    made.add_argument("--workers", default="2,4", help="numbers of ranks (2,4); a job has its own")
    made.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cpu: Gloo; cuda: NCCL, one GPU per rank"
    )
    made.add_argument("--repeats", type=int, default=21, help="timings of each at most (21)")
    made.add_argument("--seconds", type=float, default=1.5, help="for each size and number of ranks, about (1.5)")
    made.add_argument("--calibrate", action="store_true", help="calibrate anew for this sweep, whatever is stored")
    made.add_argument("--json", action="store_true", help="print JSON: seconds, bytes, bytes per second")
    add_plot(made, "times, bandwidths and ratios over sizes")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status. ``argv`` is what follows the command's name."""
    arguments = parser().parse_args(None if argv is None else list(argv))
    measure.require_amount(arguments.repeats, arguments.seconds, "--")
    chosen = _chosen(arguments.operations, OPERATIONS, "operation")
    only = None
    if arguments.algorithms is not None:
        known = sorted({NATIVE, *schedules.names(), *(name for every in OTHERS.values() for name in every)})
        only = _chosen(arguments.algorithms, known, "algorithm")
    segments = arguments.segments or ("2,4,8" if arguments.device == "cuda" else "")
    cut = sorted(set(integers(segments, "--segments", 2))) if segments else []
    blocks = sorted(set(integers(arguments.thread_blocks, "--thread-blocks", 0))) if arguments.thread_blocks else []
    if blocks and blocks[-1] > 64:
        raise ConfigurationError(f"--thread-blocks {blocks[-1]}: NCCL gives an operation 64 at most.")
    if blocks and arguments.device != "cuda":
        raise ConfigurationError("--thread-blocks: only NCCL's operations have them, add --device cuda.")
    names = tuple(f"{each}/{algorithm}" for each in chosen for algorithm in algorithms(each, only, cut, blocks))
    sweep = measure.Request(
        operations, names, tuple(sizes_of(arguments.sizes)), arguments.repeats, arguments.seconds, arguments.device
    )
    job = current_job()
    in_job = job is not None and job.world_size > 1
    path = plot_place(arguments, f"comm-{arguments.device}") if job is None or job.rank == 0 else None
    before = os.getloadavg()[0]
    found = _measured(sweep, arguments.workers, arguments.device, only, arguments.calibrate, in_job)
    if in_job and job is not None and job.rank > 0:
        return 0
    rows = [row for measured, calibration in found for row in rows_of(measured, calibration)]
    load = [before, os.getloadavg()[0]]
    if arguments.json:
        result = {"device": arguments.device, "load": load, "cores": os.cpu_count(), "summary": summary(rows)}
        print(json.dumps({**result, "rows": [asdict(row) for row in rows]}, indent=1, allow_nan=False))
    else:
        _print(rows, arguments.device, load)
    if path is not None:
        plot([row for row in rows if row.operation == chosen[0]], path)
        print(f"plot: {path}", file=sys.stderr if arguments.json else sys.stdout)
    return 0


def _chosen(text: str, known: Sequence[str], what: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words == ["all"]:
        return list(known)
    for word in words:
        if word not in known:
            raise ConfigurationError(f"there is no {what} {word!r}: {nearest(word, known)}")
    if not words:
        raise ConfigurationError(f"no {what} is named: choose from {', '.join(known)}.")
    return words


def _measured(
    sweep: measure.Request, workers: str, device: str, only: Sequence[str] | None, anew: bool, in_job: bool
) -> list[tuple[measure.Measured, Calibration]]:
    """The sweep on each number of ranks, and what predicts it: what is stored, else made first, on other sizes."""
    kept = None if anew else stored(device)
    # Shorter than the command's own, which is run once and kept.
    quick = request(
        device, [name for name in schedules.names() if only is None or name in only] or None, repeats=5, seconds=0.5
    )
    if in_job:
        first, second = measure.measure_here([quick, sweep])
        usable = kept is not None and second.hosts in kept.worlds
        return [(second, kept if usable and kept is not None else fitted([first]))]
    counts = sorted(set(integers(workers, "--workers", 2)))
    measure.require_room([sweep], counts[-1])
    found = []
    for count in counts:
        if kept is not None and (count,) in kept.worlds:
            (second,) = measure.measure([sweep], count)
            found.append((second, kept))
        else:
            first, second = measure.measure([quick, sweep], count)
            found.append((second, fitted([first])))
    return found


def _print(rows: Sequence[Row], device: str, load: Sequence[float]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=120)
    for operation, hosts in dict.fromkeys((row.operation, row.hosts) for row in rows):
        where = f" on {len(hosts)} hosts" if len(hosts) > 1 else ""
        table = Table(title=f"{operation}, {sum(hosts)} ranks{where}, {'NCCL' if device == 'cuda' else 'Gloo'}")
        for column in ("size", "algorithm", "time", "algorithm bw", "bus bw", "to native", "predicted", "off by"):
            table.add_column(column, justify="left" if column == "algorithm" else "right")
        here = [row for row in rows if (row.operation, row.hosts) == (operation, hosts)]
        for i, row in enumerate(here):
            first = not i or here[i - 1].size_bytes != row.size_bytes
            last = i + 1 == len(here) or here[i + 1].size_bytes != row.size_bytes
            best = row.seconds == min(other.seconds for other in here if other.size_bytes == row.size_bytes)
            predicted = row.predicted
            table.add_row(
                shown_size(row.size_bytes) if first else "",
                f"{row.algorithm}{' (auto)' if row.chosen else ''}",
                f"[bold]{shown_time(row.seconds)}[/bold]" if best else shown_time(row.seconds),
                shown_rate(row.algorithm_bandwidth),
                shown_rate(row.bus_bandwidth),
                "" if row.ratio is None else f"{row.ratio:.2f}",
                "" if predicted is None else shown_time(predicted),
                "" if predicted is None else f"{(predicted - row.seconds) / row.seconds:+.0%}",
                end_section=last,
            )
        console.print(table)
    told = summary(rows)
    for name, key in (("predictions", "median_error"), ("the model alone", "median_error_of_the_model")):
        if told[key] is not None:
            console.print(f"{name}: off by {told[key]:.0%} (median)")
    if told["auto_cells"]:
        console.print(
            f"auto: within 10 % of the best choice in {told['auto_within_10_percent']} of {told['auto_cells']} cells, "
            f"{told['auto_worst']:.2f} times its time at worst"
        )
    console.print(f"load of the machine before and after: {load[0]:.1f}, {load[1]:.1f} on {os.cpu_count()} cores")
