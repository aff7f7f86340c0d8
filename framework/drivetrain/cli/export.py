"""The command ``drivetrain export``: a directory checkpoint as one file in Lightning's layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drivetrain.command_line import Parser, say


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = Parser(
        prog="drivetrain export",
        description="Write a checkpoint directory as one .ckpt file. Lightning loads it (load_from_checkpoint,"
        " ckpt_path=), and drivetrain goes on from it as from the directory.",
    )
    parser.add_argument("checkpoint", type=Path, help="the directory, or a link to one such as last.ckpt")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="the file to write")
    arguments = parser.parse_args(list(argv))

    from drivetrain.checkpoint.export import to_file
    from drivetrain.errors import CheckpointError, ConfigurationError

    try:
        written = to_file(arguments.checkpoint, arguments.to)
    except CheckpointError as error:  # what was asked for cannot be done: there is no run that failed
        say(f"error: {error}")
        return ConfigurationError.exit_code
    print(f"{written}: {written.stat().st_size:,} bytes")
    return 0
