"""A GPT trained under every strategy, beside a hand-written loop of the same engine: tokens a second, and the loss.

The Trainer and the hand-written loop take turns, each in N processes of its own; ratios are of medians over the turns.
The loss is compared with that of ``single`` on the same global batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drivetrain.cli.accelerators import gpu_count
from drivetrain.command_line import Parser, positive, require_writable
from drivetrain.errors import ConfigurationError, WorkerError, nearest
from drivetrain.launch import launch
from drivetrain.launch.temporary import temporary_folder
from drivetrain_plugins.bench.gpt_sizes import SIZES
from drivetrain_plugins.bench.gpt_worker import contend


@dataclass(frozen=True)
class Contest:
    """A strategy with its options, and the hand-written engine it is compared with.

    Attributes:
        engine: function of :mod:`drivetrain_plugins.bench.gpt_by_hand`, with its argument if it makes the engine.
        replicas: whether every process reads its own part of the batch; the batch grows with them.
        pieces: micro-batches that flow through all processes; the batch has as many times a micro-batch's sequences.
        least, most: fewest and most processes; most None: as many as there are.
    """

    strategy: str
    engine: str
    argument: int | None = None
    replicas: bool = True
    pieces: int = 1
    least: int = 2
    most: int | None = None

    def scale(self, devices: int) -> int:
        """How many micro-batches a global batch is."""
        return devices if self.replicas else self.pieces

    def fits(self, devices: int) -> bool:
        return self.least <= devices and (self.most is None or devices <= self.most)

    @property
    def options(self) -> dict[str, Any]:
        name, *words = self.strategy.split(" ")
        return {"name": name, **{key: json.loads(value) for key, value in (word.split("=") for word in words)}}


CONTESTS = (
    Contest("single", "single", least=1, most=1),
    Contest("ddp", "ddp", least=1),
    Contest("ring", "ddp", least=1),
    Contest("fsdp", "fsdp", least=1),
    Contest("zero stage=1", "zero", 1, least=1),
    Contest("zero stage=2", "zero", 2, least=1),
    Contest("zero stage=3", "zero", 3, least=1),
    Contest("zero stage=3 narrow_gather=true", "zero_narrow", 3, least=1),
    Contest("tensor_parallel", "tensor_parallel", replicas=False),
    Contest("pipeline", "pipeline", replicas=False, pieces=4),
    Contest("parameter_server embedded=true", "parameter_server"),
    Contest("local_sgd period=8", "local_sgd", 8),
)


def _numbers(text: str) -> list[int]:
    return [positive(number) for number in text.split(",")]


def _names() -> list[str]:
    return sorted({contest.strategy.split(" ")[0] for contest in CONTESTS})


def parser() -> Parser:
    made = Parser(prog="python -m drivetrain.bench gpt", description=__doc__)
    made.add_argument(
        "--strategies",
        default=None,
        help="rows or kinds of them, with commas between (default: all)",
    )
    made.add_argument(
        "--devices", type=_numbers, default="1,2", help="numbers of processes, with commas between (default: 1,2)"
    )
    made.add_argument("--size", choices=sorted(SIZES), default="tiny", help="model (gpt2: 124 million parameters)")
    made.add_argument("--steps", type=positive, default=20, help="timed optimizer steps of a turn (default: 20)")
    made.add_argument("--warmup", type=positive, default=10, help="steps before them (default: 10)")
    made.add_argument("--turns", type=positive, default=2, help="turns of each side (default: 2)")
    made.add_argument("--accelerator", choices=("cpu", "cuda", "auto"), default="auto")
    made.add_argument("--compile", action="store_true", help="torch.compile on both sides")
    made.add_argument("--batch", type=positive, default=None, help="sequences of a micro-batch (default: the size's)")
    made.add_argument("--json", type=Path, default=None, help="also write the results here")
    return made


def _asked(strategies: str | None, devices: Sequence[int]) -> list[Contest]:
    """The rows that were asked for, None: all.

    Raises:
        ConfigurationError: there is none of that name, or none that as many processes make.
    """
    if strategies is None:
        return list(CONTESTS)
    rows_named = [contest.strategy for contest in CONTESTS]
    asked: list[Contest] = []
    for name in strategies.split(","):
        found = [contest for contest in CONTESTS if name in (contest.strategy, contest.strategy.split(" ")[0])]
        if not found:
            raise ConfigurationError(f"--strategies {name}: {nearest(name, [*_names(), *rows_named])}")
        if not any(contest.fits(count) for contest in found for count in devices):
            count = "one process" if found[0].most == 1 else f"{found[0].least} processes or more"
            said = ",".join(map(str, devices))
            raise ConfigurationError(f"--strategies {name} takes {count}, not --devices {said}.")
        asked += found
    return [contest for contest in CONTESTS if contest in asked]


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(list(argv))
    contests = _asked(arguments.strategies, arguments.devices)
    if arguments.json is not None:
        require_writable(arguments.json, "--json")
    rows: list[dict[str, Any]] = []
    reference: dict[int, list[float]] = {}  # single's losses by the size of the global batch
    print(f"{'strategy':<32} {'N':>2} {'tokens/s':>10} {'by hand':>10} {'ratio':>6} {'loss':>8}  largest difference")
    for devices in arguments.devices:
        for contest in contests:
            if not contest.fits(devices):
                continue
            row = _job(contest, devices, arguments)
            scale = contest.scale(devices)
            if scale not in reference:
                one = row if contest.most == 1 else _job(CONTESTS[0], 1, arguments, scale)
                reference[scale] = one.get("losses", [])
            pairs = zip(row.get("losses", []), reference[scale], strict=False)
            row["difference"] = max((abs(a - b) for a, b in pairs), default=float("nan"))
            rows.append(row)
            print(_line(row), flush=True)
            if arguments.json is not None:
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(
                    json.dumps({"arguments": vars(arguments), "rows": rows}, default=str, indent=1)
                )
    return int(any("error" in row for row in rows))


def _line(row: dict[str, Any]) -> str:
    head = f"{row['strategy']:<32} {row['devices']:>2}"
    if "error" in row:
        return f"{head} {row['error']}"
    ours, theirs = row["tokens_per_second"], row["by_hand"]
    last = f"{row['losses'][-1]:>8.4f}  {row['difference']:.1e}"
    return f"{head} {ours:>10,.0f} {theirs:>10,.0f} {ours / theirs:>6.3f} {last}"


def _job(contest: Contest, devices: int, arguments: argparse.Namespace, scale: int | None = None) -> dict[str, Any]:
    """One contest in a job of ``devices`` processes."""
    accelerator = arguments.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if gpu_count() else "cpu"
    backend = "nccl" if accelerator == "cuda" else "gloo"
    with temporary_folder("bench") as folder:
        out = folder / "result.json"
        task = {
            **asdict(contest),
            "size": arguments.size,
            "steps": arguments.steps,
            "warmup": arguments.warmup,
            "accelerator": accelerator,
            "compile": arguments.compile,
            "batch": arguments.batch,
            "scale": scale if scale is not None else contest.scale(devices),
            "out": str(out),
        }
        row: dict[str, Any] = {"strategy": contest.strategy, "devices": devices}
        found: dict[str, list[float]] = {"ours": [], "theirs": [], "losses": []}
        sides = ("ours",) if scale is not None else ("ours", "theirs") * arguments.turns
        # Each in processes of its own: some engines keep the groups of the first job for good.
        for turn, side in enumerate(sides, 1):
            try:
                launch(
                    contend,
                    {**task, "side": side},
                    workers=devices,
                    accelerator=accelerator,
                    backend=backend,
                    timeout=120.0,
                )
            except (WorkerError, ConfigurationError) as error:
                print(error, file=sys.stderr)
                return {**row, "error": f"failed: {str(error).splitlines()[0][:200]}"}
            result = json.loads(out.read_text())
            found["ours"] += result["ours"]
            found["theirs"] += result["theirs"]
            found["losses"] = result["losses"] or found["losses"]
            if scale is None:  # said at once: a row takes minutes and may be stopped
                words = {"ours": "ours", "theirs": "by hand"}[side]
                speeds = ", ".join(f"{speed:,.0f}" for speed in result[side])
                print(f"{contest.strategy}, turn {turn} of {len(sides)}: {words} {speeds}", file=sys.stderr, flush=True)
        ours, theirs = (statistics.median(found[side]) if found[side] else float("nan") for side in ("ours", "theirs"))
        return {**row, "tokens_per_second": ours, "by_hand": theirs, "losses": found["losses"], **found}
