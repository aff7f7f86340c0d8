"""Draw many projects: ``python -m tests.lightning_parity.drawn FIRST COUNT`` prints those that differ, made small.

``--devices 2`` draws projects for as many ranks; ``--spec JSON`` looks at one draw; ``--whole`` leaves draws large.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lightning_parity.drawn.comparing import shrunk, undeclared
from tests.lightning_parity.drawn.grammar import draw
from tests.lightning_parity.drawn.on_ranks import drawn_for_ranks, undeclared_on_ranks
from tests.lightning_parity.drawn.resumed import disturbed, disturbed_on_ranks, drawn_to_resume

_SECONDS = 10  # for one project under both; what is made smaller must not come to train for ever
Look = Callable[[dict[str, Any], Path], dict[str, str]]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lightning_parity.drawn", description=__doc__)
    parser.add_argument("first", type=int, nargs="?", default=0, help="the first seed")
    parser.add_argument("count", type=int, nargs="?", default=1, help="how many seeds")
    parser.add_argument("--devices", type=int, default=1, help="ranks that train each project")
    parser.add_argument("--spec", type=json.loads, help="a draw to look at instead of seeds")
    parser.add_argument("--resumed", action="store_true", help="break off and go on, under drivetrain alone")
    parser.add_argument("--whole", action="store_true", help="do not make smaller what differs")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGALRM, _too_long)

    if options.resumed and options.devices > 1:
        draws, seconds = drawn_to_resume, 40.0
        look = _told(disturbed_on_ranks, options.devices)
    elif options.resumed:
        draws, look, seconds = drawn_to_resume, _in_time(disturbed), 20.0
    elif options.devices == 1:
        draws, look, seconds = draw, _in_time(undeclared), 12.0
    else:
        draws, look, seconds = _for(options.devices)
    if options.spec is not None:
        seeds, draws = range(1), lambda seed: options.spec
    else:
        seeds = range(options.first, options.first + options.count)
    return _look_at(seeds, draws, look, 0.0 if options.whole or options.spec is not None else seconds)


def _for(ranks: int) -> tuple[Callable[[int], dict[str, Any]], Look, float]:
    return lambda seed: drawn_for_ranks(seed, ranks), _told(undeclared_on_ranks, ranks), 40.0


def _look_at(seeds: range, draws: Callable[[int], dict[str, Any]], look: Look, seconds: float) -> int:
    failed, started = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in seeds:
            spec = draws(seed)
            found = look(spec, folder)
            if found:
                failed += 1
                smallest = shrunk(spec, lambda less, found=found: bool(look(less, folder).keys() & found), seconds)
                _tell(seed, smallest, look(smallest, folder) or {f"once: {name}": found[name] for name in found})
    print(f"{len(seeds)} projects, {failed} differ, {time.monotonic() - started:.0f} s")
    return failed


def _in_time(look: Look) -> Look:
    def looked(spec: dict[str, Any], folder: Path) -> dict[str, str]:
        signal.alarm(_SECONDS)
        try:
            return look(spec, folder)
        finally:
            signal.alarm(0)

    return looked


def _told(look: Callable[[dict[str, Any], Path, int], dict[str, str]], ranks: int) -> Look:
    """``look`` on ranks, with the failure of a rank itself as a line."""

    def looked(spec: dict[str, Any], folder: Path) -> dict[str, str]:
        try:
            return look(spec, folder, ranks)
        except AssertionError as error:
            return {"ranks.raised": str(error)}

    return looked


def _tell(seed: int, spec: dict[str, Any], lines: dict[str, str]) -> None:
    print(f"seed {seed}\n  {json.dumps(spec)}", flush=True)
    errors_first = sorted(lines.items(), key=lambda item: not item[0].endswith(("error", "raised")))
    for name, line in errors_first[:6]:
        print(f"    {name}: {line[-300:] if name == 'ranks.raised' else line[:200]}", flush=True)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"longer than {_SECONDS} seconds")


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
