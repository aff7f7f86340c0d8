"""``python -m drivetrain support --train``: progress, failures as they come, and what is kept of the outcome."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from drivetrain.support import Combination
from drivetrain.support_training import LOOSE, Outcome, train

HEAD = """
## What was trained

Made by `python -m drivetrain support --train --write docs/support.md`: every combination above that a module can ask
for makes its first steps on a small GPT, and its losses are held to those of `single` in the same combination.
"Difference" is the largest seen over its bound, where a bound follows from the precision alone; with lossy gradients,
and where no exactness is claimed, losses are within {loose} of `single`'s. Strategies without a line were not.

"""
TITLES = ("strategy", "trained", "difference / bound", "not trained to these figures")
SHOWN = 5  # combinations named in the last column


def run(combinations: Sequence[Combination], jobs: int, record: Path | None) -> list[Outcome]:
    """Train ``combinations`` with a progress bar.

    Args:
        jobs: how many at a time.
        record: a file of one JSON object a line to which every outcome is added; what is in it as trained is taken over
            and not trained again.
    """
    wanted = {str(one): one for one in combinations}
    known = {name: found for name, found in read(record).items() if name in wanted and found.status == "trained"}
    console = Console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("combinations", total=len(wanted), completed=len(known))
        for found in train([one for name, one in wanted.items() if name not in known], jobs):
            known[found.combination] = found
            if record is not None:
                with record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
            if found.status != "trained":
                bar.console.print(str(found), markup=False, highlight=False, soft_wrap=True)
            bar.update(task, advance=1)
    return [known[name] for name in wanted]


def read(record: Path | None) -> dict[str, Outcome]:
    """The last outcome of each combination in ``record``."""
    if record is None or not record.exists():
        return {}
    lines = record.read_text(encoding="utf-8").splitlines()
    found = (Outcome(**json.loads(line)) for line in lines if line.endswith("}"))  # the last may have been cut off
    return {one.combination: one for one in found}


def rows(outcomes: Iterable[Outcome], names: Iterable[str]) -> dict[str, str]:
    """A line of the page's table for each strategy of ``names`` that has outcomes."""
    found = list(outcomes)
    by_name = {name: [one for one in found if one.combination.startswith(f"{name}-")] for name in names}
    return {name: _row(name, found) for name, found in by_name.items() if found}


def _row(name: str, found: Sequence[Outcome]) -> str:
    tight = [
        one.difference / one.bound for one in found if one.difference is not None and one.bound not in (None, LOOSE)
    ]
    finite = [ratio for ratio in tight if math.isfinite(ratio)]
    worst = f"{max(finite):.1e}" if finite else ""
    amiss = [str(one).removeprefix(f"{name}-").replace("|", "/") for one in found if one.status != "trained"]
    more = f"; and {len(amiss) - SHOWN} more" if len(amiss) > SHOWN else ""
    cells = [
        f"`{name}`",
        f"{len(found) - len(amiss)} of {len(found)}",
        worst,
        "; ".join(amiss[:SHOWN]) + more or "none",
    ]
    return "| " + " | ".join(cells) + " |"


def section(found: Mapping[str, str]) -> str:
    """The part of the page that tells what was trained, from its lines by strategy."""
    if not found:
        return ""
    lines = ["| " + " | ".join(TITLES) + " |", "| " + " | ".join("---" for _ in TITLES) + " |", *found.values()]
    return HEAD.format(loose=LOOSE) + "\n".join(lines) + "\n"


def kept(page: str) -> dict[str, str]:
    """The lines by strategy in the section of a page that was written before."""
    _, _, part = page.partition("\n## What was trained\n")
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    return {line.split("`")[1]: line for line in lines}
