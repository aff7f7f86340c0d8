"""``python -m drivetrain.bench NAME``: run a benchmark that some package registered under ``drivetrain.benchmarks``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from drivetrain import registry
from drivetrain.errors import DrivetrainError

USAGE = """\
usage: python -m drivetrain.bench NAME [ARGUMENTS ...]     (--help after NAME: its own arguments)

benchmarks: {names}"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark named first in ``argv`` with the rest; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    usage = USAGE.format(names=", ".join(registry.names("benchmarks")) or "none is installed")
    if words[:1] in (["--help"], ["-h"]):
        print(usage)
        return 0
    if not words:
        print(usage, file=sys.stderr)
        return 2
    try:
        return int(registry.load("benchmarks", words[0])(words[1:]) or 0)
    except DrivetrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
