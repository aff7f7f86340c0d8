"""``python -m drivetrain compare RUN_A RUN_B``: how far two runs are apart, for the promise that they are not.

Exit code 0: within the tolerance; 1: beyond it; 2: a run cannot be read.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drivetrain import record
from drivetrain.command_line import Parser
from drivetrain.errors import ConfigurationError, DrivetrainError

#: Metrics that measure the machine and not the run.
TIMES = re.compile(r"(^|[^a-z])(times?|seconds?|sec|throughput|elapsed|duration|eta)([^a-z]|$)|(_per_|/)s(ec(ond)?)?$")


@dataclass(frozen=True)
class Difference:
    """The largest absolute difference of one kind.

    Attributes:
        what: ``"optimizer steps"``, ``"loss curve"``, ``"metrics"`` or ``"weights"``.
        largest: the difference; infinite where one run has what the other has not.
        where: the step, metric or tensor it is at.
    """

    what: str
    largest: float
    where: str = ""


def compare(a: Path, b: Path) -> list[Difference]:
    """All differences between the runs in the folders ``a`` and ``b``.

    Raises:
        ConfigurationError: a folder holds no run record.
        CheckpointError: a checkpoint is damaged.
    """
    first, second = record.read(a), record.read(b)
    return [
        Difference("optimizer steps", abs(first["global_step"] - second["global_step"])),
        _loss_curve(first, second),
        _metrics(first, second),
        _weights((a, first), (b, second)),
    ]


def _loss_curve(first: Mapping[str, Any], second: Mapping[str, Any]) -> Difference:
    return _largest("loss curve", dict(first.get("loss_curve", [])), dict(second.get("loss_curve", [])), "step ")


def _metrics(first: Mapping[str, Any], second: Mapping[str, Any]) -> Difference:
    return _largest("metrics", _comparable(first), _comparable(second))


def _comparable(run: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in run.get("metrics", {}).items() if not TIMES.search(name)}


def _largest(what: str, first: Mapping[Any, float], second: Mapping[Any, float], label: str = "") -> Difference:
    lonely = sorted(set(first) ^ set(second))
    if lonely:
        return Difference(what, math.inf, f"{label}{lonely[0]} is in one run only")
    worst = Difference(what, 0.0)
    for key in first:
        apart = distance(first[key], second[key])
        if apart > worst.largest:
            worst = Difference(what, apart, f"{label}{key}")
    return worst


def distance(a: float, b: float) -> float:
    """``|a - b|``; 0 for equal infinities and for two NaN, infinite for a number and a NaN."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    apart = abs(a - b)
    return math.inf if math.isnan(apart) else apart


def _weights(a: tuple[Path, Mapping[str, Any]], b: tuple[Path, Mapping[str, Any]]) -> Difference:
    digests = [one.get("weights_digest") for _, one in (a, b)]
    if digests[0] is not None and digests[0] == digests[1]:
        return Difference("weights", 0.0, "same digest")
    paths = [_last_checkpoint(folder, one) for folder, one in (a, b)]
    if None in paths:
        missing = [str(folder) for (folder, _), path in zip((a, b), paths, strict=True) if path is None]
        return Difference("weights", math.inf, f"no checkpoint in {' nor in '.join(missing)}")
    # Imported here: two runs with one digest are compared without torch.
    from drivetrain.checkpoint import consolidate

    return tensors(*(consolidate(path) for path in paths if path is not None))


def tensors(first: Mapping[str, Any], second: Mapping[str, Any]) -> Difference:
    """The largest difference between two state dicts of tensors, computed in fp64."""
    import torch

    lonely = sorted(set(first) ^ set(second))
    if lonely:
        return Difference("weights", math.inf, f"{lonely[0]} is in one run only")
    worst = Difference("weights", 0.0)
    for name, one in first.items():
        other = second[name]
        if one.shape != other.shape:
            return Difference("weights", math.inf, f"{name} has the shapes {tuple(one.shape)} and {tuple(other.shape)}")
        one, other = one.to(torch.float64), other.to(torch.float64)
        same = (one == other) | (one.isnan() & other.isnan())
        apart = torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        largest = float(apart.max()) if apart.numel() else 0.0
        if largest > worst.largest:
            worst = Difference("weights", largest, name)
    return worst


def _last_checkpoint(folder: Path, run: Mapping[str, Any]) -> Path | None:
    """The path in the record, also after the run folder was moved."""
    noted = (run.get("checkpoints") or {}).get("last")
    if not noted:
        return None
    path = Path(noted)
    inside = folder / "checkpoints" / path.name
    return next((place for place in (inside, folder / path, path) if place.exists()), None)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = Parser(
        prog="drivetrain compare",
        description="Print the largest absolute differences between two runs: loss curve, metrics, weights."
        " Metrics that are times or throughputs are left out.",
        epilog="exit code: 0 within the tolerance, 1 beyond it, 2 when a run cannot be read",
    )
    parser.add_argument("run_a", type=Path, help="run folder, which holds run.json")
    parser.add_argument("run_b", type=Path, help="the other run folder")
    parser.add_argument("--tolerance", type=float, default=1e-10, help="largest difference that passes (default 1e-10)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    try:
        if not args.tolerance >= 0:
            raise ConfigurationError(f"--tolerance {args.tolerance} must be at least 0")
        found = compare(args.run_a, args.run_b)
    except DrivetrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # Steps are counted: half a step more is no rounding.
    within = all(one.largest <= (0 if one.what == "optimizer steps" else args.tolerance) for one in found)
    if args.json:
        plain = [{**asdict(one), "largest": one.largest if math.isfinite(one.largest) else "inf"} for one in found]
        print(json.dumps({"within": within, "tolerance": args.tolerance, "differences": plain}))
    else:
        for one in found:
            print(f"{one.what:<16} {one.largest:<12.6g} {one.where}".rstrip())
        print(f"{'within' if within else 'beyond'} the tolerance of {args.tolerance:g}")
    return 0 if within else 1


if __name__ == "__main__":
    raise SystemExit(main())
