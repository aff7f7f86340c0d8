"""``python -m drivetrain.bench NAME``: run a benchmark that some package registered under ``drivetrain.benchmarks``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from drivetrain import registry
from drivetrain.command_line import dispatch

USAGE = """\
usage: python -m drivetrain.bench NAME [ARGUMENTS ...]     (--help after NAME: its own arguments)

benchmarks: {names}"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark named first in ``argv`` with the rest; returns the exit code."""
    usage = USAGE.format(names=", ".join(registry.names("benchmarks")) or "none is installed")
    return dispatch(argv, usage, partial(registry.load, "benchmarks"))


if __name__ == "__main__":
    raise SystemExit(main())
