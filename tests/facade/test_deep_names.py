"""Names that projects import from deep within Lightning: each is here under its path, or said not to be."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import logging
import pkgutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import lightning.fabric
import lightning.pytorch
from lightning_utilities.core.rank_zero import WarningCache

from drivetrain.errors import ConfigurationError
from drivetrain.lightning import not_offered
from tests.facade.test_surface import SUBMODULES, page

SECTION = "Deep modules"
GONE = "serve"  # cannot be imported without packages that nothing here needs


def modules() -> Iterator[tuple[str, types.ModuleType]]:
    """Lightning's public modules by their paths below ``drivetrain.lightning``; those of Fabric's begin with it."""
    for root, prefix in ((lightning.pytorch, ""), (lightning.fabric, "fabric.")):
        for found in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            path = prefix + found.name.removeprefix(f"{root.__name__}.")
            hidden = any(part.startswith("_") for part in path.split("."))
            if not hidden and path.split(".")[0] != GONE:
                yield path, importlib.import_module(found.name)


def defined(module: types.ModuleType) -> set[str]:
    """Public names that are made in ``module``, not imported into it."""
    names: set[str] = set()
    assert module.__file__ is not None
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    found = {name: vars(module)[name] for name in names & set(vars(module)) if not name.startswith("_")}
    return {
        name
        for name, value in found.items()
        if getattr(value, "__module__", module.__name__) in (module.__name__, "typing", "builtins", None)
        and not isinstance(value, logging.Logger | TypeVar | WarningCache | types.ModuleType)
    }


def surface() -> dict[str, set[str]]:
    """Names by module path, without those that the tables of the upper modules list."""
    found: dict[str, set[str]] = {}
    for path, module in modules():
        top = path.split(".")[0]
        upper = [lightning.pytorch, *([vars(lightning.pytorch)[top]] if top in SUBMODULES else [])]
        listed = {
            name: value
            for owner in upper
            for name, value in vars(owner).items()
            if name in getattr(owner, "__all__", ())
        }
        names = {name for name in defined(module) if listed.get(name) is not vars(module)[name]}
        if names:
            found[path] = names
    return found


def here(path: str) -> Any:
    """What ``path`` leads to below ``drivetrain.lightning``."""
    try:
        return importlib.import_module(f"drivetrain.lightning.{path}")
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(f"drivetrain.lightning.{module}".rstrip(".")), name)


def refusal(path: str) -> str:
    """What ``from ... import`` says of it, or making an object where only that is refused."""
    module, _, name = f"drivetrain.lightning.{path}".rpartition(".")
    try:
        exec(f"from {module} import {name}\n{name}()")
    except (ImportError, ConfigurationError) as error:
        return str(error)
    return "nothing"


def test_every_deep_name_is_listed(repository: Path) -> None:
    listed = page(repository)[SECTION]
    missing, known = [], set()
    for path, names in surface().items():
        above = [".".join(path.split(".")[:count]) for count in range(1, path.count(".") + 2)]
        whole = [upper for upper in above if upper in listed]
        known.update(whole, above)
        if not whole:
            missing += [f"{path}.{name}" for name in sorted(names) if f"{path}.{name}" not in listed]
        known |= {f"{path}.{name}" for name in names}
    assert not missing
    gone = [row for row in set(listed) - known - {GONE} if not of_lightning(row)]
    assert not gone


def of_lightning(path: str) -> bool:
    """Whether Lightning has it: a module without names of its own, or a name of another module or called private."""
    full = f"lightning.{path}" if path.startswith("fabric.") else f"lightning.pytorch.{path}"
    module, _, name = full.rpartition(".")
    if path == "Fabric":
        module = "lightning"
    return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(full) is not None


def test_what_the_page_says_of_deep_names_is_so(repository: Path) -> None:
    wrong = []
    for row, there in page(repository)[SECTION].items():
        if there == "not offered":
            said = refusal(row)
            if "is not offered: " not in said or "\n" in said:
                wrong.append(f"{row}: {said}")
            continue
        try:
            here(row)
        except (ImportError, AttributeError) as error:
            wrong.append(f"{row}: {error}")
    assert not wrong


def test_upper_names_are_found_by_their_deep_paths(repository: Path) -> None:
    """``callbacks.early_stopping.EarlyStopping`` is ``callbacks.EarlyStopping``."""
    tables = page(repository)
    wrong, seen = [], 0
    for path, module in modules():
        top = path.split(".")[0]
        for name in sorted(defined(module) - surface_of(path)):
            listed = tables.get(top, {}).get(name, "same")
            if top == "fabric" or listed == "not offered":
                continue
            seen += 1
            upper = "" if hasattr(importlib.import_module("drivetrain.lightning"), name) else f"{top}."
            try:
                same = here(f"{path}.{name}") is here(upper + name)
            except (ImportError, AttributeError) as error:
                wrong.append(f"{path}.{name}: {error}")
            else:
                if not same:
                    wrong.append(f"{path}.{name} is another")
    assert not wrong and seen > 50


_SURFACE: dict[str, set[str]] = {}


def surface_of(path: str) -> set[str]:
    if not _SURFACE:
        _SURFACE.update(surface())
    return _SURFACE.get(path, set())


def test_functions_take_what_lightnings_take(repository: Path) -> None:
    listed = page(repository)[SECTION]
    wrong, seen = [], 0
    for path, module in modules():
        for name in surface_of(path):
            value = vars(module)[name]
            if listed.get(f"{path}.{name}") not in ("same", "better") or not inspect.isfunction(value):
                continue
            seen += 1
            theirs = inspect.signature(value).parameters
            ours = inspect.signature(here(f"{path}.{name}")).parameters
            if list(theirs) != list(ours) or any(theirs[one].default != ours[one].default for one in theirs):
                wrong.append(
                    f"{path}.{name}{inspect.signature(here(f'{path}.{name}'))}, not {inspect.signature(value)}"
                )
    assert not wrong and seen > 30


def test_a_path_is_an_attribute_too() -> None:
    """``pl.utilities.warnings.PossibleUserWarning``, after nothing but ``import ... as pl``: in a process of its own,
    because to import a path makes it an attribute."""
    paths = [path for path, _ in modules() if path.partition(".")[0] in SUBMODULES and path.count(".") == 1]
    asked = [path for path in paths if path not in not_offered.MODULES]
    program = f"""
import importlib, drivetrain.lightning as pl
for path in {asked}:
    home, name = path.split(".")
    attribute = getattr(getattr(pl, home), name)
    assert attribute is importlib.import_module(f"drivetrain.lightning.{{path}}"), path
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
