"""What Lightning's examples, and scripts made from them, print when they start."""

from __future__ import annotations

LIGHTNING_LOGO = "drivetrain"


def cli_lightning_logo() -> None:
    """The name between two empty lines, in the colour of Lightning's picture."""
    print(f"\n\033[0;35m{LIGHTNING_LOGO}\033[0m\n")
