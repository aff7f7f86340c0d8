"""Which packages are installed: those that drivetrain needs, and the optional extras. Read from metadata only."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from drivetrain.doctor.finding import Finding

PART = "installed"
LAUNCHERS = ("torchrun", "mpirun", "srun")
# "deepspeed>=0.19; extra == 'zero'": the name, and the extra that asks for it.
_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9][\w.-]*)([^;]*)(?:;.*extra\s*==\s*['\"]([\w-]+)['\"])?")


def installed() -> Iterator[Finding]:
    """Python, drivetrain, what it needs, its extras, and the launchers of others."""
    yield Finding(PART, "python", "ok", sys.version.split()[0])
    yield Finding(PART, "drivetrain", "ok", version("drivetrain"))
    extras: dict[str, list[str]] = {}
    for name, wanted, extra in requirements():
        if extra:
            extras.setdefault(extra, []).append(name)
            continue
        yield needed(name, wanted, version_of(name))
    for extra, names in extras.items():
        versions = {name: version_of(name) for name in names}
        words = ", ".join(f"{name} {found}" if found else f"no {name}" for name, found in versions.items())
        missing = None in versions.values()
        yield Finding(
            PART,
            f"extra {extra}",
            "note" if missing else "ok",
            words,
            f"pip install 'drivetrain[{extra}]' adds it, if you want it" if missing else "",
        )
    for name in LAUNCHERS:
        place = shutil.which(name)
        yield Finding(PART, name, "ok" if place else "note", place or "not found; only needed to start workers with it")


def needed(name: str, wanted: str, found: str | None) -> Finding:
    """A package that drivetrain cannot do without, ``wanted`` as in ``>=2.11``."""
    if found is None:
        return Finding(PART, name, "fail", "missing", f"pip install '{name}{wanted}'")
    least = re.search(r">=\s*([\d.]+)", wanted)
    if least is not None and _numbers(found) < _numbers(least[1]):
        return Finding(PART, name, "fail", f"{found} is too old", f"pip install --upgrade '{name}{wanted}'")
    return Finding(PART, name, "ok", found)


def _numbers(text: str) -> list[int]:
    """``"2.13.0+cpu"`` gives ``[2, 13, 0]``."""
    release = re.match(r"\d+(\.\d+)*", text)
    return [int(part) for part in release[0].split(".")] if release else []


def requirements() -> list[tuple[str, str, str]]:
    """``(package, wanted versions, extra)`` of drivetrain; the extra is empty for what is always needed."""
    found = (_REQUIREMENT.match(line) for line in requires("drivetrain") or [])
    return [(match[1], match[2].strip(), match[3] or "") for match in found if match is not None]


def version_of(package: str) -> str | None:
    """The installed version of ``package``; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
