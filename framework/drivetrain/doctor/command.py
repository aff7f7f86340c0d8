"""``drivetrain doctor``: look at everything, print it, and say by the exit code whether training works here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence

from drivetrain.command_line import Parser
from drivetrain.doctor.exchange import exchange
from drivetrain.doctor.finding import Finding
from drivetrain.doctor.installed import installed
from drivetrain.doctor.machine import machine

DESCRIPTION = """Look at this installation and this machine: versions and optional extras, processors and GPUs, limits,
loopback, and an all-reduce of two worker processes with its latency and bandwidth. Ends with 0 where training works, 1
where it does not, and says what to fix."""
MARKS = {"ok": "ok", "note": "-", "warn": "warn", "fail": "FAIL"}
LOOKS: tuple[Callable[[], Iterable[Finding]], ...] = (installed, machine, exchange)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = Parser(prog="drivetrain doctor", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    arguments = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    findings: list[Finding] = []
    part = ""
    for look in LOOKS:
        for finding in look():
            findings.append(finding)
            if arguments.json:
                continue
            if finding.part != part:
                part = finding.part
                print(part)
            print(f"  {MARKS[finding.state]:<5} {finding.name:<20} {finding.found}", flush=True)
    works = all(finding.state != "fail" for finding in findings)
    if arguments.json:
        print(json.dumps({"works": works, "findings": [finding.as_dict() for finding in findings]}, indent=2))
    else:
        print(conclusion(findings, works))
    return 0 if works else 1


def conclusion(findings: Sequence[Finding], works: bool) -> str:
    """What to do, the worst first, and whether training works."""
    order = ("fail", "warn", "note")
    todo = sorted((one for one in findings if one.fix), key=lambda one: order.index(one.state))
    lines = [
        "to fix" if todo else "nothing to fix",
        *(f"  {MARKS[one.state]:<5} {one.name}: {one.fix}" for one in todo),
    ]
    return "\n".join([*lines, "training works here" if works else "training does NOT work here"])
