"""All-reduce over a slow link between two hosts: what each algorithm sends over it, and how long it takes.

The hosts are network namespaces of this machine (Linux, root), joined by a link of a given rate; their ranks are
started by drivetrain's own launcher, once on each host, and meet over the link. Bytes are the link's own counters, so
headers and acknowledgements are in them; beside them stands what the schedule says. Times are the slowest rank's.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from drivetrain.comm.counts import shares_to_other_hosts
from drivetrain.comm.schedule import Schedule
from drivetrain.comm.schedules import make, names, topology
from drivetrain.command_line import Parser
from drivetrain_plugins.bench.namespaces import LinkedHosts

NATIVE = "native"
PORT = 29400
NODE = "drivetrain_plugins.bench.hosts_node"

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status. ``argv`` is what follows the command's name."""
    known = [NATIVE, *names()]
    parser = Parser(prog="python -m drivetrain.bench hosts", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=25.0, help="size of the tensor, in 10^6 bytes (25)")
    parser.add_argument("--megabits", type=float, default=200.0, help="rate of the link, in 10^6 bits a second (200)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on each host (2)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each, interleaved; the median counts (3)")
    parser.add_argument("--algorithms", default=",".join(known), help=f"{','.join(known)}; all by default")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    options = parser.parse_args(argv)
    algorithms = options.algorithms.split(",")
    if min(options.megabytes, options.megabits) <= 0 or min(options.ranks, options.repeats) < 1:
        parser.error("--megabytes, --megabits, --ranks and --repeats must be positive")
    for name in algorithms:
        if name != NATIVE:
            topology(name)
    rows = measure(algorithms, options.ranks, options.megabytes * 1e6, options.megabits, options.repeats)
    print(json.dumps(rows) if options.json else table(rows, options.ranks, options.megabytes, options.megabits))
    return 0


def table(rows: Sequence[Row], ranks: int, megabytes: float, megabits: float) -> str:
    """The rows for a reader; MB are 10^6 bytes."""
    lines = [
        f"2 hosts x {ranks} ranks, {megabytes:g} MB, {megabits:g} Mbit/s each way",
        f"{'algorithm':<20} {'MB over the link':>16} {'by the schedule':>15} {'busier way':>10} {'seconds':>8}",
    ]
    for row in rows:
        expected = "" if row["expected"] is None else f"{sum(row['expected']) / 1e6:.1f}"
        lines.append(
            f"{row['algorithm']:<20} {sum(row['sent']) / 1e6:16.1f} {expected:>15} {max(row['sent']) / 1e6:10.1f} "
            f"{row['seconds']:8.2f}"
        )
    return "\n".join(lines)


def between_hosts(plan: Schedule, host_of: Sequence[int], nbytes: float) -> list[float]:
    """Bytes of a tensor of ``nbytes`` that each host sends to others under ``plan``, by the host of each rank."""
    sent = [Fraction(0)] * (max(host_of) + 1)
    for host, share in zip(host_of, shares_to_other_hosts(plan, host_of), strict=True):
        sent[host] += share
    return [float(share) * nbytes for share in sent]


def measure(algorithms: Sequence[str], ranks: int, nbytes: float, megabits: float, repeats: int) -> list[Row]:
    """One row for each algorithm: ``sent`` and ``expected`` (bytes by host), ``seconds`` and ``all_seconds``.

    Raises:
        ConfigurationError: no hosts can be made here.
        RuntimeError: a node failed; the message is what it said.
    """
    with LinkedHosts(megabits) as hosts, tempfile.TemporaryFile("w+", encoding="utf-8") as words:
        request = {"algorithms": list(algorithms), "ranks": ranks, "numel": int(nbytes) // 4, "repeats": repeats}
        nodes = [
            host.start(
                [sys.executable, "-m", NODE, json.dumps({**request, "node": number, "address": hosts[0].address})],
                environment(),
                stdout=subprocess.PIPE if number == 0 else words,
                stderr=words,
                text=True,
            )
            for number, host in enumerate(hosts.hosts)
        ]
        printed, _ = nodes[0].communicate()
        codes = [node.wait() for node in nodes]
        if any(codes):
            words.seek(0)
            raise RuntimeError(f"nodes of the benchmark ended with {codes}:\n{words.read()}")
        found: dict[str, Row] = json.loads(printed.splitlines()[-1])
    host_of = [rank // ranks for rank in range(2 * ranks)]
    return [
        {
            "algorithm": name,
            "sent": found[name]["sent"],
            "expected": None
            if name == NATIVE
            else between_hosts(make(name, 2 * ranks, [ranks, ranks]), host_of, nbytes),
            "seconds": statistics.median(found[name]["seconds"]),
            "all_seconds": found[name]["seconds"],
        }
        for name in algorithms
    ]


def environment() -> dict[str, str]:
    """That of this process without what holds only for one host."""
    own = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    # Where the package lies, also when it was not installed; one thread a rank.
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    return {**own, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
