"""A draw run under both libraries: where they differ beyond what is declared, and the smallest draw that still does."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import lightning.pytorch

import drivetrain.lightning
from tests.lightning_parity.comparison import differences
from tests.lightning_parity.drawn.declared import allowed, comparable, outside
from tests.lightning_parity.drawn.project import kinds_of, project
from tests.lightning_parity.laboratory import run

Spec = dict[str, Any]


def undeclared(spec: Spec, folder: Path) -> dict[str, str]:
    """A line for each fact in which the two runs of ``spec`` differ undeclared."""
    if outside(spec):
        return {}
    facts = []
    for name, library in (("there", lightning.pytorch), ("here", drivetrain.lightning)):
        try:
            facts.append(run(project(spec), library, folder / name))
        except Exception as error:
            facts.append({"note.made.raised": kinds_of(error), "note.made.error": repr(error)})
        finally:
            shutil.rmtree(folder / name, ignore_errors=True)
    theirs, ours = comparable(*facts)
    found = differences(theirs, ours)
    patterns = allowed(spec)
    return {name: line for name, line in found.items() if not any(fnmatchcase(name, p) for p in patterns)}


def shrunk(spec: Spec, differs: Callable[[Spec], bool], seconds: float = 12.0) -> Spec:
    """``spec`` without whatever can go so that ``differs`` still holds, as far as that is found in time."""
    until = time.monotonic() + seconds
    again = True
    while again:
        again = False
        paths = sorted(_paths(spec), key=len)
        for path in paths:
            for smaller in _without(spec, path):
                if time.monotonic() > until:
                    return spec
                if differs(smaller):
                    spec, again = smaller, True
                    break
    return spec


def _without(spec: Spec, path: tuple[Any, ...]) -> Iterator[Spec]:
    """``spec`` without what is at ``path``, or with a smaller number there."""
    less = copy.deepcopy(spec)
    holder: Any = less
    try:
        for key in path[:-1]:
            holder = holder[key]
        value = holder.pop(path[-1])
    except (KeyError, IndexError):  # it went with another part
        return
    yield less
    if type(value) is int and value > 2 and isinstance(holder, dict):
        for smaller in sorted({2, value // 2, value - 1}):
            holder[path[-1]] = smaller
            yield copy.deepcopy(less)


def _paths(value: Any, head: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items: Any = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield (*head, key)
        yield from _paths(part, (*head, key))
