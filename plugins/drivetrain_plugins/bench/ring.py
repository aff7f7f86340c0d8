"""Our ring all-reduce against the transport's own: interleaved repeats, medians of the slowest rank, and their ratio.

Both run in a thread that does nothing else, as the hook that averages gradients does: the scheduler would make a thread
that has just filled the tensor wait for others. Processor time per rank and the shortest times are shown too: on a
machine that others share they say more than the median of the time that passed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain.comm.execute import SEGMENT_BYTES
from drivetrain.comm.measure import join_group, run_ranks
from drivetrain.comm.shared_memory import SLOT_BYTES
from drivetrain.command_line import Parser

if TYPE_CHECKING:
    import torch

Row = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status. ``argv`` is what follows the command's name."""
    parser = Parser(prog="python -m drivetrain.bench ring", description=__doc__)
    parser.add_argument("--sizes", type=_numbers(float), default=[1, 10, 25, 100], help="MB (10^6 bytes): 1,10,25,100")
    parser.add_argument("--ranks", type=_numbers(int), default=[2, 4], help="numbers of ranks: 2,4")
    parser.add_argument("--repeats", type=int, default=11, help="timed pairs per size; the median counts (11)")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="nccl: one GPU per rank")
    parser.add_argument(
        "--segment-mb",
        type=_numbers(float),
        default=[SEGMENT_BYTES / 2**20],
        help="longest message of our ring on CPUs, in MiB; several are compared in the same repeats: 0.25,0.5,1. It is"
        " 1 at most through memory that ranks of one host share; DRIVETRAIN_SHARED_MEMORY=0 takes Gloo's connections.",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    options = parser.parse_args(argv)
    if options.repeats < 1 or min(options.ranks) < 2 or min(*options.sizes, *options.segment_mb, 1) <= 0:
        parser.error("--repeats, --sizes and --segment-mb must be positive and --ranks at least 2")
    rows = [row for world_size in options.ranks for row in measure(world_size, options)]
    if options.json:
        print(json.dumps(rows))
        return 0
    name = options.backend
    titles = [f"{name} ms", "ring ms", "ratio", f"{name} min", "ring min", f"{name} cpu", "ring cpu"]
    print(f"{'ranks':>5} {'MB':>6} {'segment':>7} " + " ".join(f"{title:>8}" for title in titles))
    for row in rows:
        print(
            f"{row['ranks']:5.0f} {row['megabytes']:6g} {row['segment_mb']:7g} {row['native_ms']:8.2f} "
            f"{row['ring_ms']:8.2f} {row['ratio']:8.2f} {row['native_min_ms']:8.2f} {row['ring_min_ms']:8.2f} "
            f"{row['native_cpu_ms']:8.2f} {row['ring_cpu_ms']:8.2f}"
        )
    return 0


def measure(world_size: int, options: argparse.Namespace) -> list[Row]:
    """One row per size and segment length: medians over the repeats of the slowest rank's time.

    Raises:
        MeasurementError: a rank failed; its own traceback is on standard error.
    """
    rows: list[Row] = run_ranks(_rank, world_size, vars(options))
    return rows


def _rank(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> list[Row]:
    import torch
    import torch.distributed as dist

    from drivetrain.comm.execute import Executor
    from drivetrain.comm.topologies.ring import ring

    comm = join_group(rank, world_size, folder, "cuda" if options["backend"] == "nccl" else "cpu")
    device = comm.device
    segments = options["segment_mb"]
    operations: list[Callable[[torch.Tensor], object]] = [
        partial(comm.all_reduce, algorithm="native"),
        *(Executor(ring(world_size), comm, segment_bytes=int(segment * 2**20)) for segment in segments),
    ]
    thread = ThreadPoolExecutor(1, initializer=_own_device, initargs=(device.type == "cuda", rank))

    def timed(operation: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> tuple[float, float]:
        tensor.fill_(1.0)
        comm.all_reduce(torch.ones(1, device=device), algorithm="native")
        if device.type == "cuda":
            torch.cuda.synchronize()
        started, cpu = time.perf_counter(), time.process_time()
        thread.submit(operation, tensor).result()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - started, time.process_time() - cpu
        if tensor[0].item() != world_size or tensor[-1].item() != world_size:
            raise RuntimeError(f"rank {rank} got {tensor[0].item()} instead of {world_size}")
        return took

    rows: list[Row] = []
    for megabytes in options["sizes"]:
        tensor = torch.empty(max(1, int(megabytes * 1e6) // 4), device=device)
        times = []
        for repeat in range(options["repeats"] + 1):
            # Start with another one each time, so that none always follows the same load.
            first = repeat % len(operations)
            took = {i: timed(operations[i], tensor) for i in (*range(first, len(operations)), *range(first))}
            times.append([took[i] for i in range(len(operations))])
        # The first round prepares buffers and connections.
        mine = torch.tensor(times[1:], dtype=torch.float64, device=device)
        slowest = torch.stack(comm.all_gather(mine)).amax(0).movedim(0, -1).mul(1e3).tolist()
        native, cpu = slowest[0]
        for segment, (ring_times, ring_cpu) in zip(segments, slowest[1:], strict=True):
            row = {
                "ranks": world_size,
                "megabytes": megabytes,
                "segment_mb": segment if comm.links is None else min(segment, SLOT_BYTES / 2**20),
                "native_ms": statistics.median(native),
                "native_min_ms": min(native),
                "native_cpu_ms": statistics.median(cpu),
                "ring_ms": statistics.median(ring_times),
                "ring_min_ms": min(ring_times),
                "ring_cpu_ms": statistics.median(ring_cpu),
            }
            rows.append({**row, "ratio": row["ring_ms"] / row["native_ms"]})
    thread.shutdown()
    dist.destroy_process_group()
    return rows


def _own_device(cuda: bool, rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(rank)


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = f"comma-separated {kind.__name__} list"
    return parse
