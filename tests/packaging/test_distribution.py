"""What `pip install drivetrain` puts on a machine, built from the checkout and from the source distribution."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.patience import LIMIT

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

LOAD_ALL = """
import json, sys
from importlib.metadata import Distribution
from pathlib import Path

folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
import drivetrain, drivetrain_plugins

[info] = folder.glob("*.dist-info")
loaded = {}
for entry in Distribution.at(info).entry_points:
    loaded[f"{entry.group}:{entry.name}"] = callable(entry.load()) or type(entry.load()).__name__
print(json.dumps({"from": [drivetrain.__file__, drivetrain_plugins.__file__], "loaded": loaded}))
"""


def run(*command: object, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def names(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as it lies in site-packages."""
    folder = tmp_path_factory.mktemp("site-packages")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def files_of(folder: str) -> set[str]:
    """Files of ``folder`` in the checkout, relative to it, without what Python leaves there."""
    found = (path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.as_posix() for path in found if "__pycache__" not in path.parts}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("framework/drivetrain", "drivetrain"),
        ("plugins/drivetrain_plugins", "drivetrain_plugins"),
        ("conf", "drivetrain/_data/conf"),
        ("recipes", "drivetrain/_data/recipes"),
    ],
)
def test_everything_is_in_the_wheel(wheel: Path, source: str, target: str) -> None:
    shipped = names(wheel)
    assert {f"{target}/{name}" for name in files_of(source)} - shipped == set()


def test_what_users_need_is_in_the_wheel_and_nothing_else(wheel: Path) -> None:
    shipped = names(wheel)
    assert {"drivetrain/py.typed", "drivetrain_plugins/py.typed"} <= shipped
    recipe = {"__init__.py", "module.py", "data.py", "README.md"}
    assert {f"drivetrain/_data/recipes/mnist/{name}" for name in recipe} <= shipped
    version = PROJECT["project"]["version"]
    assert {name.split("/")[0] for name in shipped} == {
        "drivetrain",
        "drivetrain_plugins",
        f"drivetrain-{version}.dist-info",
    }
    unwanted = ("/tests/", "/test_", "/conftest", "__pycache__", "/outputs/")
    assert [name for name in shipped if any(part in f"/{name}" for part in unwanted)] == []


def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path)
    [archive] = tmp_path.glob("*.tar.gz")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", tmp_path / "out", archive, cwd=tmp_path)
    [rebuilt] = (tmp_path / "out").glob("*.whl")
    assert names(rebuilt) == names(wheel)


def test_metadata_says_what_pyproject_says(unpacked: Path) -> None:
    [info] = unpacked.glob("*.dist-info")
    found = Distribution.at(info)
    project = PROJECT["project"]
    assert (found.metadata["Name"], found.version) == (project["name"], project["version"])
    assert set(found.metadata.get_all("Provides-Extra") or []) == set(project["optional-dependencies"])
    plain = {canonicalize_name(r.name) for r in map(Requirement, found.requires or []) if r.marker is None}
    assert plain == {canonicalize_name(Requirement(r).name) for r in project["dependencies"]}


def test_every_entry_point_loads_from_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    """From the unpacked wheel alone and outside the checkout: what is missing there cannot be found elsewhere."""
    outcome = json.loads(run(sys.executable, "-P", "-c", LOAD_ALL, unpacked, cwd=tmp_path))
    assert all(Path(path).is_relative_to(unpacked) for path in outcome["from"])
    declared = {
        f"{group}:{name}" for group, entries in PROJECT["project"]["entry-points"].items() for name in entries
    } | {f"console_scripts:{name}" for name in PROJECT["project"]["scripts"]}
    assert set(outcome["loaded"]) == declared
    # A strategy or compressor is registered as its declaration; everything else is a class or a function.
    declarations = {"drivetrain.strategies": "Declaration", "drivetrain.compressors": "CompressorDeclaration"}
    wrong = {
        name: kind for name, kind in outcome["loaded"].items() if kind != declarations.get(name.partition(":")[0], True)
    }
    assert wrong == {}


def test_everything_that_is_asked_for_is_pinned() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            [exactly] = requirement.specifier
            assert exactly.operator == "==", f"{line} is not an exact version"
            pins[canonicalize_name(requirement.name)] = exactly.version
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        wanted += extra
    for requirement in map(Requirement, wanted):
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(version), f"{requirement} does not allow the pinned {version}"
