"""What counting traffic costs: of one operation and one mark of a phase, with profiling off and on, and of a step.

Only the bookkeeping is timed, in this process: an operation itself takes a hundred times as long and varies by more
than all of this.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from drivetrain.comm import phase
from drivetrain.comm.statistics import Statistics
from drivetrain.command_line import Parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status. ``argv`` is what follows the command's name."""
    parser = Parser(prog="python -m drivetrain.bench profiling", description=__doc__)
    parser.add_argument("--operations", type=int, default=32, help="operations in a step (32)")
    parser.add_argument("--marks", type=int, default=8, help="marks of a phase in a step (8)")
    parser.add_argument(
        "--step-ms", type=float, default=5.0, help="length of the step that costs are compared with (5)"
    )
    parser.add_argument("--repeats", type=int, default=11, help="timed blocks; the least counts (11)")
    parser.add_argument("--json", action="store_true", help="print the row as JSON instead of lines")
    options = parser.parse_args(argv)
    if min(options.operations, options.marks, options.repeats, options.step_ms) <= 0:
        parser.error("all numbers must be positive")
    off, on = Statistics(), Statistics(profiling=True)
    blocks = {"off": lambda: _operations(off), "on": lambda: _operations(on), "mark": _marks, "nothing": _nothing}
    least = dict.fromkeys(blocks, float("inf"))
    for _ in range(options.repeats):  # interleaved, so that all meet the same load
        for name, block in blocks.items():
            least[name] = min(least[name], _timed(block))
    cost = {name: max(0.0, seconds - least["nothing"]) / _COUNT for name, seconds in least.items()}
    step = options.step_ms / 1e3
    extra = options.operations * (cost["on"] - cost["off"])
    row = {
        "operation_off_ns": cost["off"] * 1e9,
        "operation_on_ns": cost["on"] * 1e9,
        "mark_ns": cost["mark"] * 1e9,
        "off_share": (options.operations * cost["off"] + options.marks * cost["mark"]) / step,
        "on_share": (options.operations * cost["off"] + options.marks * cost["mark"] + extra) / step,
    }
    if options.json:
        print(json.dumps(row))
        return 0
    print(f"an operation counted:  {row['operation_off_ns']:6.0f} ns, profiled {row['operation_on_ns']:6.0f} ns")
    print(f"a mark of a phase:     {row['mark_ns']:6.0f} ns")
    print(
        f"a step of {options.step_ms:g} ms with {options.operations} operations and {options.marks} marks: "
        f"{100 * row['off_share']:.2f} % off, {100 * row['on_share']:.2f} % on"
    )
    return 0


_COUNT = 20_000


def _timed(block: Callable[[], None]) -> float:
    started = time.perf_counter()
    block()
    return time.perf_counter() - started


def _operations(statistics: Statistics) -> None:
    for _ in range(_COUNT):
        started = statistics.start()
        statistics.finish("all_reduce", started, 4096, 2, 4096)


def _marks() -> None:
    for _ in range(_COUNT):
        phase.current.name = phase.BACKWARD


def _nothing() -> None:
    for _ in range(_COUNT):
        pass
