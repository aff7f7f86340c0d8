from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml

from drivetrain import registry
from drivetrain.cli.compose import loader, session
from drivetrain.cli.options import LauncherOptions, TrainerOptions
from drivetrain.cli.request import Request
from drivetrain.folders import folder

CONF = folder("conf")
# No model, and a strategy of the tests that takes little: both are refused in test_request.
REFUSED = {("model", "none"), ("recipe", "none"), ("strategy", "picky")}
FILES = sorted(CONF.rglob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(CONF)) for file in FILES])
def test_every_option_is_explained(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert any(line.startswith("# ") and not line.startswith("# @package") for line in lines)
    body = lines[: lines.index("hydra:")] if "hydra:" in lines else lines
    for line in body:
        # Names of groups and of Hydra's own keys explain themselves; an option does not.
        if ":" in line and not line.lstrip().startswith(("#", "-")) and not line.rstrip().endswith(":"):
            assert "# " in line, f"{file.name}: {line}"


@pytest.mark.parametrize("schema", [("trainer/default", TrainerOptions), ("launcher/local", LauncherOptions)])
def test_yaml_and_schema_say_the_same(schema: tuple[str, type]) -> None:
    name, options = schema
    assert yaml.safe_load((CONF / f"{name}.yaml").read_text()) == asdict(options())


def test_yaml_of_a_strategy_lists_what_it_declares() -> None:
    for file in (CONF / "strategy").glob("*.yaml"):
        listed = yaml.safe_load(file.read_text())
        declared = registry.load("strategies", listed.pop("name"))
        assert listed == {item.name: getattr(declared.options(), item.name) for item in fields(declared.options)}


def test_every_choice_composes_and_passes_the_check(request_of: Callable[..., Request]) -> None:
    with session():
        choices = {group: loader().get_group_options(group) for group in loader().list_groups("") if group != "hydra"}
    assert {"strategy", "recipe", "model", "data", "optimizer", "scheduler", "precision", "callbacks"} <= set(choices)
    assert {"logger", "checkpoint", "launcher", "trainer"} <= set(choices)
    used = {group: [name for name in names if (group, name) not in REFUSED] for group, names in choices.items()}
    compressors, strategies = used.pop("compression"), used.pop("strategy")
    for turn in range(max(len(names) for names in used.values())):
        request_of([f"{group}={names[turn % len(names)]}" for group, names in used.items()])
    for name in strategies:  # not every one takes every precision
        request_of([f"strategy={name}"])
    for name in compressors:  # few strategies take them
        request_of([f"compression={name}", "strategy=ddp"])
