"""A script as a project has it: its Trainer starts the second worker."""

from __future__ import annotations

from tests.lightning_parity.command_lines.parts import Data, Net, cli

if __name__ == "__main__":
    cli.LightningCLI(Net, Data)
