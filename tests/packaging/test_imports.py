"""Any module can be the first that a program imports: no two need each other while they are loaded.

A cycle is not seen as long as everybody comes in by the same door; a project whose first import is
``drivetrain.lightning.loops`` met one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import drivetrain
import drivetrain_plugins


def modules() -> dict[str, ast.Module]:
    """Those of both packages, by name."""
    found = {}
    for package in (drivetrain, drivetrain_plugins):
        root = Path(package.__path__[0])
        for path in root.rglob("*.py"):
            name = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(body: Iterable[ast.stmt]) -> Iterator[str]:
    """What is imported when a module is loaded, names of what it takes from there included."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from imported([*node.body, *node.orelse])
        elif isinstance(node, ast.Try | ast.With):
            yield from imported(node.body)


def test_no_modules_need_each_other() -> None:
    trees = modules()
    assert len(trees) > 400
    needs: dict[str, set[str]] = {}
    for name, tree in trees.items():
        asked = [*imported(tree.body)]
        # A package of which a module is taken is loaded before, and again asked for nothing.
        packages = {one.rpartition(".")[0] for one in asked if one in trees}
        needs[name] = {one for one in asked if one in trees and one not in packages} - {name}
    assert sum(map(len, needs.values())) > 1000
    TopologicalSorter(needs).prepare()  # raises CycleError, which names the modules


def test_who_warns_by_rank_has_one() -> None:
    """What ``lightning_utilities`` gives raises where nobody has said which rank this is."""
    takers = [name for name, tree in modules().items() if f"{_RANK_ZERO}.rank_zero_warn" in imported(tree.body)]
    assert takers == ["drivetrain.rank_zero"]


_RANK_ZERO = "lightning_utilities.core.rank_zero"
