"""The table at the end of a run or a sweep."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drivetrain import record
from drivetrain.command_line import say, silence

_COLOURS = {"completed": "green", "stopped": "green", "interrupted": "yellow", "failed": "red"}
_FINAL = ("val/", "test/")


@dataclass
class Outcome:
    """How one job of a command ended.

    Attributes:
        overrides: what the user wrote for this job.
        folder: its run folder.
        record: its run record, empty where it never began.
        error: the sentence that ended it.
    """

    overrides: Sequence[str]
    folder: Path
    record: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def status(self) -> str:
        return str(self.record.get("status", "failed"))

    def keep(self, folder: Path, number: int) -> None:
        """Leave it in ``folder``, as job ``number``, for :func:`kept` in the process that shows the table. A folder
        that is not there is on another host, whose table can say nothing of this job."""
        if folder.is_dir():
            told = {"overrides": list(self.overrides), "folder": str(self.folder), "error": self.error}
            (folder / f"{number:06}.json").write_text(json.dumps(told), encoding="utf-8")


def kept(folder: Path) -> list[Outcome]:
    """What jobs left there, by their numbers."""
    found = []
    for file in sorted(folder.glob("*.json")):
        told = json.loads(file.read_text(encoding="utf-8"))
        run = Path(told["folder"])
        found.append(Outcome(told["overrides"], run, record.left_in(run), told["error"]))
    return found


def show(outcomes: Sequence[Outcome], sweep: bool, console: Console | None = None) -> None:
    """Print one row for each job of a sweep, or one for each metric of a single run. Where that cannot be shown (a pipe
    that nobody reads, a full device) the runs are complete all the same: it is told on standard error."""
    try:
        _show(outcomes, sweep, console or Console())
        sys.stdout.flush()
    except (OSError, SystemExit) as error:  # rich leaves the program where nobody reads
        silence(sys.stdout)
        why = error.strerror if isinstance(error, OSError) else "nobody reads it"
        folders = ", ".join(_short(outcome.folder) for outcome in outcomes)
        say(f"the table cannot be shown ({why}); what was run is in {folders}")


def _show(outcomes: Sequence[Outcome], sweep: bool, console: Console) -> None:
    if not console.is_terminal:
        console = Console(width=160)  # a log has no edge, and rich would take 80 columns
    if sweep:
        console.print(_jobs(outcomes))
        for number, outcome in enumerate(outcomes):
            if outcome.error:
                first = outcome.error.splitlines()[0]
                console.print(f"job {number} failed: {first}", style="red", markup=False, soft_wrap=True)
        return
    for outcome in outcomes:
        console.print(_metrics(outcome))
        console.print(f"run folder: {_short(outcome.folder)}", markup=False, soft_wrap=True, highlight=False)


def _jobs(outcomes: Sequence[Outcome]) -> Table:
    names = sorted({name for one in outcomes for name in one.record.get("metrics", {}) if name.startswith(_FINAL)})
    # An override that all jobs share tells them apart no more than its absence.
    shared = set.intersection(*(set(one.overrides) for one in outcomes)) if len(outcomes) > 1 else set()
    table = Table(title="1 job" if len(outcomes) == 1 else f"{len(outcomes)} jobs")
    table.add_column("job", justify="right")
    table.add_column("overrides", overflow="fold")
    table.add_column("status", no_wrap=True)
    for name in (*names, "seconds"):
        table.add_column(Text(name), justify="right", overflow="fold")  # plain: rich would read [brackets] as markup
    for number, one in enumerate(outcomes):
        metrics = one.record.get("metrics", {})
        table.add_row(
            str(number),
            Text(" ".join(override for override in one.overrides if override not in shared)),
            Text(one.status, style=_COLOURS[one.status]),
            *(_number(metrics.get(name)) for name in names),
            _number(one.record.get("seconds", {}).get("total")),
        )
    return table


def _metrics(outcome: Outcome) -> Table:
    run = outcome.record
    workers = f"{run['world_size']} worker{'s' if run['world_size'] > 1 else ''}"
    table = Table(title=f"strategy={run['strategy']}, {workers}: {run['status']}", min_width=40)
    table.add_column("metric")
    table.add_column("value", justify="right")
    rows = {
        **run.get("metrics", {}),
        "epochs": run["epochs"],
        "optimizer steps": run["global_step"],
        "samples per second": run["throughput"]["samples_per_second"],
        "seconds": run["seconds"]["total"],
    }
    for name, value in rows.items():
        table.add_row(Text(name), _number(value))
    return table


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _short(folder: Path) -> str:
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)
