"""``python -m drivetrain.comm draw TOPOLOGY``: who sends what to whom in each round, as text or as an image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from drivetrain.comm import schedules
from drivetrain.comm.command import Parser, integers
from drivetrain.comm.counts import count, host_of_ranks
from drivetrain.comm.schedule import Messages, Schedule
from drivetrain.command_line import require_writable
from drivetrain.errors import ConfigurationError

MOST = 64  # ranks; more cannot be read


def text(schedule: Schedule) -> str:
    """A line for each round, an item for each message: ``0→1 +2`` adds chunk 2 of rank 0 to rank 1's, ``=`` copies."""
    found = count(schedule)
    lines = [
        f"{schedule.name}: {schedule.kind}, ranks: {schedule.world_size}, chunks: {schedule.chunks}, rounds: "
        f"{found.rounds}, most sent by a rank: {found.share} of the tensor   (+ added, = copied)"
    ]
    width = max((len(each.phase) for each in schedule.rounds), default=0)
    for number, each in enumerate(schedule.rounds):
        messages = "   ".join(f"{source}→{target} {what}" for source, target, what, _ in _items(each.messages()))
        lines.append(f"{number:>4}  {each.phase:<{width}} {each.step:>3}   {messages}")
    return "\n".join(lines)


def _items(messages: Messages) -> Iterator[tuple[int, int, str, bool]]:
    columns = (messages.source, messages.destination, messages.chunk, messages.count, messages.add)
    for source, target, chunk, size, add in zip(*(column.tolist() for column in columns), strict=True):
        chunks = str(chunk) if size == 1 else f"{chunk}-{chunk + size - 1}"
        yield source, target, f"{'+' if add else '='}{chunks}", add


def image(schedule: Schedule, path: Path, hosts: Sequence[int] | None = None) -> None:
    """Ranks from top to bottom, rounds from left to right, an arrow for each message; lines part the hosts.

    Raises:
        ConfigurationError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("--output needs matplotlib: install drivetrain[docs].") from error
    rounds, ranks = len(schedule.rounds), schedule.world_size
    figure = Figure(figsize=(min(2.5 + 1.1 * rounds, 60), min(1.5 + 0.45 * ranks, 40)), layout="constrained")
    axes = figure.subplots()
    labelled = rounds * ranks <= 300
    for number, each in enumerate(schedule.rounds):
        for source, target, what, add in _items(each.messages()):
            colour = "tab:red" if add else "tab:blue"
            arrow = {"arrowstyle": "->", "color": colour, "lw": 1.2, "shrinkA": 2, "shrinkB": 2}
            axes.annotate("", xy=(number + 0.92, target), xytext=(number + 0.08, source), arrowprops=arrow)
            if labelled:
                # At its source, where no two messages through one port meet.
                axes.text(number + 0.05, source - 0.14, what, fontsize=6, color=colour)
    for number in range(1, rounds):
        axes.axvline(number, color="0.85", lw=0.8)
    for rank in range(1, ranks) if hosts is not None else ():
        host = host_of_ranks(ranks, hosts or ())
        if host[rank] != host[rank - 1]:
            axes.axhline(rank - 0.5, color="0.5", lw=0.8, ls="--")
    phases = [f"{each.phase} {each.step}".replace("_", "\n", 1) for each in schedule.rounds]
    axes.set_xticks([number + 0.5 for number in range(rounds)], phases, fontsize=7)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    axes.set(xlim=(0, max(rounds, 1)), ylim=(ranks - 0.4, -0.6))
    axes.set_title(f"{schedule.name}: {schedule.kind}, {ranks} ranks (red is added, blue is copied)", fontsize=9)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot write the drawing to {path}: {error}: name another file.") from error


def parser() -> Parser:
    made = Parser(prog="python -m drivetrain.comm draw", description=__doc__)
    made.add_argument("topology", help=f"one of {', '.join(schedules.names())}")
    made.add_argument("--workers", type=int, default=8, help="number of ranks (default 8)")
    made.add_argument("--hosts", help="ranks on each host, for example 4,4, for topologies that look at hosts")
    made.add_argument("--output", type=Path, metavar="FILE.png", help="draw an image instead of printing text")
    return made


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    arguments = parser().parse_args(list(argv))
    if not 1 <= arguments.workers <= MOST:
        raise ConfigurationError(f"--workers {arguments.workers} cannot be drawn legibly: pass 1 to {MOST}.")
    hosts = None if arguments.hosts is None else integers(arguments.hosts, "--hosts")
    if hosts is not None:
        host_of_ranks(arguments.workers, hosts)
    if arguments.output is not None:
        require_writable(arguments.output, "--output", image=True)
    schedule = schedules.make(arguments.topology, arguments.workers, hosts)
    if arguments.output is None:
        print(text(schedule))
    else:
        image(schedule, arguments.output, hosts)
    return 0
