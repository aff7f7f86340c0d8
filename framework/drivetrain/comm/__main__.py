"""``python -m drivetrain.comm COMMAND``: prove, cost and draw collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from drivetrain.errors import DrivetrainError, nearest

COMMANDS = {
    "verify": ("drivetrain.comm.verify:main", "prove every algorithm for many numbers of ranks"),
    "scale": ("drivetrain.comm.scale:main", "predict times of all topologies at many numbers of workers"),
    "calibrate": ("drivetrain.comm.calibrate:calibrate_main", "measure collectives here and fit the cost model"),
    "predict": ("drivetrain.comm.calibrate:predict_main", "what each all-reduce should take by the calibration"),
    "draw": ("drivetrain.comm.draw:main", "show who sends what to whom in each round"),
}


def usage() -> str:
    """What ``--help`` prints."""
    lines = [f"  {name:<9}  {what}" for name, (_, what) in COMMANDS.items()]
    head = "usage: python -m drivetrain.comm COMMAND [ARGUMENTS ...]     (--help after COMMAND: its own)"
    return "\n".join([head, "", *lines])


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
