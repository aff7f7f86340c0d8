"""``python -m drivetrain.comm COMMAND``: prove, cost and draw collectives."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.command_line import dispatch_listed

COMMANDS = {
    "verify": ("drivetrain.comm.verify:main", "prove every algorithm for many numbers of ranks"),
    "scale": ("drivetrain.comm.scale:main", "predict times of all topologies at many numbers of workers"),
    "calibrate": ("drivetrain.comm.calibrate:calibrate_main", "measure collectives here and fit the cost model"),
    "predict": ("drivetrain.comm.calibrate:predict_main", "what each all-reduce should take by the calibration"),
    "draw": ("drivetrain.comm.draw:main", "show who sends what to whom in each round"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named first in ``argv`` with the rest; returns the exit code."""
    return dispatch_listed(argv, "python -m drivetrain.comm", COMMANDS)


if __name__ == "__main__":
    raise SystemExit(main())
