"""The installed command ``drivetrain`` and ``python -m drivetrain``: one word chooses what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from drivetrain.errors import DrivetrainError, nearest

COMMANDS = {
    "train": ("drivetrain.app:run", "train, validate, test or predict (the same as python train.py)"),
    "compare": ("drivetrain.compare:main", "compare two runs: loss curve, metrics, weights"),
    "export": ("drivetrain.cli.export:main", "turn a checkpoint into one file that Lightning loads too"),
    "support": ("drivetrain.support:main", "which strategies go with which precision, compression, clipping, ..."),
    "doctor": ("drivetrain.doctor.command:main", "whether training works here, how fast ranks exchange, what to fix"),
    "bench": ("drivetrain.bench:main", "run a benchmark"),
}


def usage() -> str:
    """What ``drivetrain --help`` prints."""
    lines = [f"  {name:<8}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: drivetrain COMMAND [ARGUMENTS ...]     (--help after COMMAND: its own)", "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named first in ``argv`` with the rest; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["--help"], ["-h"]):
        print(usage())
        return 0
    if not words:
        print(usage(), file=sys.stderr)
        return 2
    if words[0] not in COMMANDS:
        print(f"error: there is no command {words[0]!r}: {nearest(words[0], COMMANDS)}", file=sys.stderr)
        return 2
    module, _, name = COMMANDS[words[0]][0].partition(":")
    command: Callable[[Sequence[str]], int] = getattr(import_module(module), name)
    try:
        return command(words[1:])
    except DrivetrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
