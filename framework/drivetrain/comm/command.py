"""What the commands of ``python -m drivetrain.comm`` share: arguments whose mistakes are one sentence, and where their
figures go."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from itertools import count
from pathlib import Path

from drivetrain.comm.schedules import names
from drivetrain.command_line import Parser, require_writable
from drivetrain.errors import ConfigurationError, nearest

__all__ = ["Parser", "add_plot", "integers", "plot_place", "topologies"]

MOST = 2**15  # ranks; of more a ring has too many messages to look at in minutes


def add_plot(parser: Parser, what: str) -> None:
    """The options ``--plot FILE`` and ``--no-plot`` of a command whose figure shows ``what``."""
    either = parser.add_mutually_exclusive_group()
    default = "a new PNG in this folder, and none with --json"
    either.add_argument("--plot", type=Path, metavar="FILE.png", help=f"draw {what} there (default: {default})")
    either.add_argument("--no-plot", action="store_true", help="draw nothing")


def plot_place(arguments: argparse.Namespace, name: str) -> Path | None:
    """Where the figure goes, before any work: the file that was named, else ``NAME.png``, ``NAME-2.png``, ... in this
    folder, whichever is not there yet; None for no figure.

    A figure that nobody asked for by name is left out, with a note on standard error, where it cannot be made.

    Raises:
        ConfigurationError: the file named cannot be written, or matplotlib, which it needs, is not installed.
    """
    named: Path | None = arguments.plot
    drawable = find_spec("matplotlib") is not None
    if named is not None:
        require_writable(named, "--plot", image=True)
        if not drawable:
            raise ConfigurationError("--plot needs matplotlib: install drivetrain[docs].")
        return named
    if arguments.no_plot or arguments.json:
        return None
    if not drawable or not os.access(".", os.W_OK):
        problem = "this folder may not be written" if drawable else "matplotlib is not installed"
        print(f"no plot: {problem}", file=sys.stderr)
        return None
    numbered = (Path(f"{name}.png" if number == 1 else f"{name}-{number}.png") for number in count(1))
    return next(path for path in numbered if not path.exists())


def integers(text: str, what: str, least: int = 1) -> list[int]:
    """Comma-separated whole numbers, from ``least`` to ``MOST`` each.

    Raises:
        ConfigurationError: something else is written.
    """
    try:
        numbers = [int(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise ConfigurationError(f"{what} {text!r} are no whole numbers: write them as 8,64,512.") from error
    if not numbers or min(numbers) < least:
        raise ConfigurationError(f"{what} {text!r} must each be {least} or more: write them as 8,64,512.")
    if max(numbers) > MOST:
        raise ConfigurationError(f"{what} {text!r} must each be {MOST} or less, as every message is looked at.")
    return numbers


def topologies(text: str | None) -> list[str]:
    """Comma-separated names of topologies; all that are registered where nothing is written.

    Raises:
        ConfigurationError: one is not registered.
    """
    chosen = names() if text is None else [word.strip() for word in text.split(",") if word.strip()]
    for name in chosen:
        if name not in names():
            raise ConfigurationError(f"there is no topology {name!r}: {nearest(name, names())}")
    if not chosen:
        raise ConfigurationError(f"no topology is named: choose from {', '.join(names())}.")
    return chosen
