"""``python -m tests``: the whole suite in two pytest processes at once, each with half of it.

Tests of one process leave a core idle, those of several workers do not: side by side they need the time of the sum of
their work. Each process counts and cleans up for itself, so nothing is shared. A line is printed when it is complete;
what failed in either and the closing lines of both come last, where a log that is cut still has them.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
# About half of the work; everything else, what is new too, is in the other half.
FIRST = [
    "compression",
    "contract",
    "federated",
    "parameter_server",
    "parity",
    "strategies",
]


def halves() -> tuple[list[str], list[str]]:
    """pytest's arguments for each process: together every test once."""
    first = [str(HERE / name) for name in FIRST if (HERE / name).is_dir()]
    return first, [str(HERE), *(f"--ignore={path}" for path in first)]


def tell(number: int, stream: IO[str], kept: list[str]) -> None:
    for line in stream:
        kept.append(line.rstrip("\n"))
        print(f"{number}| {kept[-1]}", flush=True)


def main() -> int:
    started = [
        subprocess.Popen(
            [sys.executable, "-u", "-m", "pytest", *half, *sys.argv[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for half in halves()
    ]
    kept: list[list[str]] = [[] for _ in started]
    readers = []
    for number, process in enumerate(started, 1):
        assert process.stdout is not None
        readers.append(threading.Thread(target=tell, args=(number, process.stdout, kept[number - 1])))
        readers[-1].start()
    try:
        codes = [process.wait() for process in started]
    except KeyboardInterrupt:  # both were told by the terminal and say what they have
        codes = [process.wait() or 1 for process in started]
    for reader in readers:
        reader.join()
    for number, lines in enumerate(kept, 1):
        for line in lines:
            if line.startswith(("FAILED ", "ERROR ")):
                print(f"{number}| {line}")
    for lines in kept:
        print(lines[-1] if lines else "pytest said nothing")
    return max(abs(code) for code in codes)


if __name__ == "__main__":
    sys.exit(main())
