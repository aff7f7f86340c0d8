"""The package that parses, and what is said where it is not installed."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.imports import RequirementCache

from drivetrain.errors import MissingPackageError

NEEDED = "jsonargparse[signatures]>=4.53,<5"  # as in pyproject.toml's extra ``cli``


def require(name: str) -> None:
    """Nothing, where the package is installed, with what it reads signatures with.

    Args:
        name: of what needs it.

    Raises:
        MissingPackageError: it is not.
    """
    if not RequirementCache(NEEDED):
        raise MissingPackageError(f"{name} needs the package jsonargparse: pip install '{NEEDED}'")


def absent_parser() -> type | None:
    """A class in the parser's place where the package is not installed, of which no object is made; else None."""
    if RequirementCache(NEEDED):
        return None

    def refuse(self: Any, *arguments: Any, **options: Any) -> None:
        require("LightningArgumentParser")

    return type("LightningArgumentParser", (), {"__module__": __package__, "__init__": refuse})
