"""How long training takes to begin: seconds from the command to the end of its first training batch.

The command is ``drivetrain train`` with the words given, in a folder that is removed afterwards; it stops after one
step. Beside it, what a Python that imports torch needs, measured by turns: no command can begin sooner.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain import Callback
from drivetrain.command_line import Parser
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.launch.temporary import temporary_folder


class FirstBatch(Callback):
    """Writes when the first training batch was over, in seconds since the epoch.

    Args:
        path: of the file, which the first rank writes.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_rank == 0 and not self.path.exists():
            self.path.write_text(repr(time.time()))


def seconds_to_first_batch(words: Sequence[str]) -> float:
    """Of ``drivetrain train WORDS``.

    Raises:
        ConfigurationError: the command refused its words.
        DrivetrainError: it failed. Either message holds the end of what it said.
    """
    with temporary_folder("start") as folder:
        told = folder / "first"
        own = [
            f"+callbacks.first_batch={{_target_: {__name__}.FirstBatch, path: {json.dumps(str(told))}}}",
            "trainer.max_steps=1",
            f"hydra.run.dir={json.dumps(str(folder / 'run'))}",
        ]
        command = [sys.executable, "-m", "drivetrain", "train", *words, *own]
        began = time.time()
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode or not told.exists():
            kind = ConfigurationError if ended.returncode == 2 else DrivetrainError
            raise kind(f"drivetrain train {' '.join(words)} failed:\n{(ended.stdout + ended.stderr)[-2000:]}")
        return float(told.read_text()) - began


def seconds_to_import_torch() -> float:
    """Of a Python that does nothing else."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status. ``argv`` is what follows the command's name."""
    parser = Parser(prog="python -m drivetrain.bench start", description=__doc__)
    parser.add_argument("words", nargs="*", default=["strategy=ring"], help="of the command (default: strategy=ring)")
    parser.add_argument("--repeats", type=int, default=3, help="commands; the median counts (3)")
    parser.add_argument("--json", action="store_true", help="print JSON: seconds")
    arguments = parser.parse_args(None if argv is None else list(argv))
    if arguments.repeats < 1:
        raise ConfigurationError(f"--repeats {arguments.repeats}: give 1 or more.")
    words = arguments.words or ["strategy=ring"]
    ours, imports = [], []
    for _ in range(arguments.repeats):
        imports.append(seconds_to_import_torch())
        ours.append(seconds_to_first_batch(words))
    if arguments.json:
        print(json.dumps({"words": words, "first_batch": ours, "import_torch": imports}))
        return 0
    for name, found in (("importing torch", imports), (f"first batch of {' '.join(words)}", ours)):
        print(f"{name:<40} {statistics.median(found):6.2f} s  ({', '.join(f'{each:.2f}' for each in found)})")
    print(f"{'ratio':<40} {statistics.median(ours) / statistics.median(imports):6.2f}")
    return 0
