"""Where two runs' facts differ, and whether that is what was declared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

ABSENT = "absent"
TOLERANCE = 1e-6  # of numbers that were reduced; weights are compared to the bit


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, str]:
    """A line for each fact that is not the same in both."""
    found = {}
    for name in sorted({*theirs, *ours}):
        line = _differ(theirs.get(name, ABSENT), ours.get(name, ABSENT))
        if line is not None:
            found[name] = line
    return found


def unexpected(found: Mapping[str, str], declared: Mapping[str, str]) -> list[str]:
    """Lines for differences that no pattern of ``declared`` covers, and for patterns that cover none."""
    lines = [f"{n}: {line}" for n, line in found.items() if not any(fnmatchcase(n, pattern) for pattern in declared)]
    for pattern, words in declared.items():
        if not any(fnmatchcase(name, pattern) for name in found):
            lines.append(f"{pattern}: declared to differ ({words}) but it is the same in both")
    return lines


def _differ(theirs: Any, ours: Any) -> str | None:
    if torch.is_tensor(theirs) and torch.is_tensor(ours):
        if theirs.shape != ours.shape:
            return f"shape {tuple(theirs.shape)} there, {tuple(ours.shape)} here"
        if theirs.device != ours.device:
            return f"on {theirs.device} there, on {ours.device} here"
        if torch.equal(theirs, ours) or (theirs.is_floating_point() and bool((theirs.isnan() & ours.isnan()).all())):
            return None
        return f"differ by up to {float((theirs.double() - ours.double()).abs().max()):.3g}"
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        if {*theirs} != {*ours}:
            return f"only there: {_short({*theirs} - {*ours})}, only here: {_short({*ours} - {*theirs})}"
        return next((f"[{k}] {line}" for k in theirs if (line := _differ(theirs[k], ours[k])) is not None), None)
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        for index, (a, b) in enumerate(zip(theirs, ours, strict=False)):
            line = _differ(a, b)
            if line is not None:
                return f"[{index}] of {len(theirs)} and {len(ours)}: {line}"
        return None if len(theirs) == len(ours) else f"{len(theirs)} there, {len(ours)} here: {_rest(theirs, ours)}"
    if isinstance(theirs, float) or isinstance(ours, float):
        try:
            a, b = float(theirs), float(ours)
        except (TypeError, ValueError):
            return f"{theirs!r} there, {ours!r} here"
        if (math.isnan(a) and math.isnan(b)) or a == b or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-9):
            return None
        return f"{a!r} there, {b!r} here"
    return None if theirs == ours else f"{_short(theirs)} there, {_short(ours)} here"


def _rest(theirs: Any, ours: Any) -> str:
    shared = min(len(theirs), len(ours))
    return f"then {_short(theirs[shared : shared + 3])} there, {_short(ours[shared : shared + 3])} here"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 200 else text[:200] + "..."
