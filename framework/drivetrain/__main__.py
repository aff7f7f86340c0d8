"""The installed command ``drivetrain`` and ``python -m drivetrain``: one word chooses what to do."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.command_line import dispatch_listed

COMMANDS = {
    "train": ("drivetrain.app:run", "train, validate, test or predict (the same as python train.py)"),
    "compare": ("drivetrain.compare:main", "compare two runs: loss curve, metrics, weights"),
    "export": ("drivetrain.cli.export:main", "turn a checkpoint into one file that Lightning loads too"),
    "support": ("drivetrain.support:main", "which strategies go with which precision, compression, clipping, ..."),
    "doctor": ("drivetrain.doctor.command:main", "whether training works here, how fast ranks exchange, what to fix"),
    "bench": ("drivetrain.bench:main", "run a benchmark"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named first in ``argv`` with the rest; returns the exit code."""
    return dispatch_listed(argv, "drivetrain", COMMANDS)


if __name__ == "__main__":
    raise SystemExit(main())
