"""``python -m drivetrain.comm verify``: prove every algorithm for many numbers of ranks, one line each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drivetrain.comm import counts, schedules
from drivetrain.comm.check import ScheduleError, check
from drivetrain.comm.command import MOST, Parser, integers
from drivetrain.comm.counts import Counts
from drivetrain.comm.schedule import Schedule
from drivetrain.comm.topologies.chain import chain
from drivetrain.comm.topologies.halving_doubling import halving_doubling
from drivetrain.comm.topologies.hierarchical import balanced_hosts, hierarchical
from drivetrain.comm.topologies.ring import ring
from drivetrain.comm.topologies.tree import tree
from drivetrain.errors import ConfigurationError, nearest

SEGMENTS = 2


@dataclass(frozen=True)
class Algorithm:
    """Something to prove for every number of ranks, with its counts in the literature where there are any."""

    make: Callable[[int], Schedule]
    expected: Callable[[int], Counts] | None = None


def _root(n: int) -> int:
    """Some rank that is neither first nor last where there is one."""
    return n // 3


def _prime_factors(n: int) -> list[int]:
    """For as many levels as can be; ``[1]`` for one rank."""
    found, factor = [], 2
    while n > 1:
        while n % factor == 0:
            found.append(factor)
            n //= factor
        factor += 1
    return found or [1]


EXPECTED: dict[str, Callable[[int], Counts]] = {
    "ring": counts.ring_counts,
    "tree": counts.tree_counts,
    "recursive_doubling": counts.recursive_doubling_counts,
    "halving_doubling": counts.halving_doubling_counts,
    "hierarchical": lambda n: counts.hierarchical_counts(balanced_hosts(n)),
}
VARIANTS = {
    f"ring in {SEGMENTS} segments": Algorithm(lambda n: ring(n, SEGMENTS), lambda n: counts.ring_counts(n, SEGMENTS)),
    "ring reduce_scatter": Algorithm(lambda n: ring(n, kind="reduce_scatter"), counts.half_ring_counts),
    "ring all_gather": Algorithm(lambda n: ring(n, kind="all_gather"), counts.half_ring_counts),
    "hierarchical of prime levels": Algorithm(
        lambda n: hierarchical(n, levels=_prime_factors(n)), lambda n: counts.level_counts(_prime_factors(n))
    ),
    "halving reduce_scatter": Algorithm(lambda n: halving_doubling(n, "reduce_scatter"), counts.halving_counts),
    "doubling all_gather": Algorithm(lambda n: halving_doubling(n, "all_gather")),
    "tree reduce": Algorithm(lambda n: tree(n, "reduce", _root(n)), counts.tree_reduce_counts),
    "tree broadcast": Algorithm(lambda n: tree(n, "broadcast", _root(n)), counts.tree_broadcast_counts),
    "tree gather": Algorithm(lambda n: tree(n, "gather", _root(n)), counts.tree_gather_counts),
    "tree scatter": Algorithm(lambda n: tree(n, "scatter", _root(n)), counts.tree_scatter_counts),
    "chain all_reduce": Algorithm(
        lambda n: chain(n, "all_reduce", _root(n), SEGMENTS), lambda n: counts.chain_counts(n, SEGMENTS, 2)
    ),
    "chain reduce": Algorithm(
        lambda n: chain(n, "reduce", _root(n), SEGMENTS), lambda n: counts.chain_counts(n, SEGMENTS)
    ),
    "chain broadcast": Algorithm(
        lambda n: chain(n, "broadcast", _root(n), SEGMENTS), lambda n: counts.chain_counts(n, SEGMENTS)
    ),
}


def algorithms() -> dict[str, Algorithm]:
    """All registered topologies, a stranger's too, and what else is built in."""
    registered = {name: Algorithm(schedules.topology(name), EXPECTED.get(name)) for name in schedules.names()}
    return registered | VARIANTS


def prove(algorithm: Algorithm, world_size: int) -> Counts:
    """Check the schedule, and its counts against the literature's.

    Raises:
        ScheduleError: it is wrong, or takes other rounds or bytes than the literature says.
    """
    schedule = algorithm.make(world_size)
    found = check(schedule)
    if algorithm.expected is not None and found != (expected := algorithm.expected(world_size)):
        raise ScheduleError(
            schedule,
            f"takes {found.rounds} rounds and {found.share} of the tensor per rank, but the literature says "
            f"{expected.rounds} and {expected.share}.",
        )
    return found


def parser() -> Parser:
    made = Parser(prog="python -m drivetrain.comm verify", description=__doc__)
    made.add_argument("--up-to", type=int, default=130, help="prove every number of ranks from 1 to this (default 130)")
    made.add_argument("--also", default="", help="further numbers of ranks, for example 512,1000,1024,4096")
    made.add_argument("--only", default=None, metavar="NAME,...", help="only these algorithms (default: all)")
    return made


def main(argv: Sequence[str]) -> int:
    """The command; returns 1 if an algorithm failed."""
    from rich.console import Console
    from rich.progress import Progress

    arguments = parser().parse_args(list(argv))
    if arguments.up_to < 1:
        raise ConfigurationError(f"--up-to {arguments.up_to} leaves nothing to prove: pass 1 or more.")
    if arguments.up_to > MOST:
        raise ConfigurationError(f"--up-to {arguments.up_to} is more than can be looked at: pass {MOST} or less.")
    also = integers(arguments.also, "--also") if arguments.also else []
    sizes = sorted({*range(1, arguments.up_to + 1), *also})
    chosen = _chosen(arguments.only)
    width = max(map(len, chosen))
    failed = 0
    console = Console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("proving", total=len(chosen) * len(sizes))
        for name, algorithm in chosen.items():
            started = time.perf_counter()
            try:
                for size in sizes:
                    progress.update(bar, description=f"{name}, {size} ranks")
                    found = prove(algorithm, size)
                    progress.advance(bar)
            except ScheduleError as error:
                failed += 1
                line = f"FAILED: {error}"
            else:
                literature = "counts of the literature" if algorithm.expected else "no counts to compare with"
                line = (
                    f"proved for {len(sizes)} world sizes, {literature}; at {sizes[-1]} ranks {found.rounds} rounds, "
                    f"{float(found.share):.4g} of the tensor per rank ({time.perf_counter() - started:.1f} s)"
                )
            console.print(f"{name:<{width}}  {line}", highlight=False, markup=False, soft_wrap=True)
    return 1 if failed else 0


def _chosen(only: str | None) -> dict[str, Algorithm]:
    known = algorithms()
    if only is None:
        return known
    wanted = [word.strip() for word in only.split(",") if word.strip()]
    for name in wanted:
        if name not in known:
            raise ConfigurationError(f"there is no algorithm {name!r}: {nearest(name, known)}")
    if not wanted:
        raise ConfigurationError(f"--only names no algorithm: choose from {', '.join(known)}.")
    return {name: known[name] for name in wanted}
