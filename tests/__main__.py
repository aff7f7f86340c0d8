"""``python -m tests``: the whole suite in three pytest processes at once, each with a part of it.

A test of one process leaves a core idle, and so does one whose workers wait for each other or for the end of something:
with one process more than there are cores, two cores have work nearly all the time. Each process counts and cleans up
for itself, so nothing is shared. A line is printed when it is complete; what failed in any and the closing lines of all
come last, where a log that is cut still has them.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
# Parts that take about as long, the workers of the first having most of the processor time; everything else, what is
# new too, is in a part of its own.
PARTS = [
    ["contract", "parity", "strategies"],
    [
        "app",
        "bench",
        "comm",
        "compression",
        "faults",
        "federated",
        "hosts",
        "launch",
        "parameter_server",
        "third_party",
    ],
]


def parts() -> list[list[str]]:
    """pytest's arguments for each process: together every test once."""
    named = [[str(HERE / name) for name in part if (HERE / name).is_dir()] for part in PARTS]
    return [*named, [str(HERE), *(f"--ignore={path}" for part in named for path in part)]]


def tell(number: int, stream: IO[str], kept: list[str]) -> None:
    for line in stream:
        kept.append(line.rstrip("\n"))
        print(f"{number}| {kept[-1]}", flush=True)


def main() -> int:
    started = [
        subprocess.Popen(
            [sys.executable, "-u", "-m", "pytest", *part, *sys.argv[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in parts()
    ]
    kept: list[list[str]] = [[] for _ in started]
    readers = []
    for number, process in enumerate(started, 1):
        assert process.stdout is not None
        readers.append(threading.Thread(target=tell, args=(number, process.stdout, kept[number - 1])))
        readers[-1].start()
    try:
        codes = [process.wait() for process in started]
    except KeyboardInterrupt:  # all were told by the terminal and say what they have
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
