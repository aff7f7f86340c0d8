"""What the commands of ``python -m drivetrain.comm`` share: arguments whose mistakes are one sentence."""

from __future__ import annotations

from drivetrain.comm.schedules import names
from drivetrain.command_line import Parser
from drivetrain.errors import ConfigurationError, nearest

__all__ = ["Parser", "integers", "topologies"]


def integers(text: str, what: str, least: int = 1) -> list[int]:
    """Comma-separated whole numbers, of at least ``least`` each.

    Raises:
        ConfigurationError: something else is written.
    """
    try:
        numbers = [int(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise ConfigurationError(f"{what} {text!r} are no whole numbers: write them as 8,64,512.") from error
    if not numbers or min(numbers) < least:
        raise ConfigurationError(f"{what} {text!r} must each be {least} or more: write them as 8,64,512.")
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
