"""Draw many projects: ``python -m tests.lightning_parity.drawn FIRST COUNT`` prints those that differ, made small."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.lightning_parity.drawn.comparing import shrunk, undeclared
from tests.lightning_parity.drawn.grammar import draw

_SECONDS = 10  # for one project under both; what is made smaller must not come to train for ever


def main(first: int, count: int) -> int:
    signal.signal(signal.SIGALRM, _too_long)
    failed, started = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            spec = draw(seed)
            found = {*_lines(spec, folder)}
            if found:
                failed += 1
                smallest = shrunk(spec, lambda less, found=found: bool({*_lines(less, folder)} & found))
                _tell(seed, smallest, _lines(smallest, folder))
    print(f"{count} projects, {failed} differ, {time.monotonic() - started:.0f} s")
    return failed


def _lines(spec: dict[str, Any], folder: str) -> dict[str, str]:
    signal.alarm(_SECONDS)
    try:
        return undeclared(spec, Path(folder))
    finally:
        signal.alarm(0)


def _tell(seed: int, spec: dict[str, Any], lines: dict[str, str]) -> None:
    print(f"seed {seed}\n  {json.dumps(spec)}", flush=True)
    errors_first = sorted(lines.items(), key=lambda item: not item[0].endswith(("error", "raised")))
    for name, line in errors_first[:4]:
        print(f"    {name}: {line[:200]}", flush=True)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"longer than {_SECONDS} seconds")


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]))))
