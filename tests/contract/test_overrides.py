"""The page's table of which entries of the contract a strategy overrides is drawn from the code."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch._dynamo  # the implementations import it, which sets a variable and makes a folder  # noqa: F401

from drivetrain.strategy import Strategy
from drivetrain.support import declarations

# In the order in which the contract defines them.
ENTRIES = [name for name, value in vars(Strategy).items() if callable(value) and not name.startswith("_")]


def table() -> str:
    rows = ["| strategy | entries it overrides |", "|---|---|"]
    implementations: dict[str, str] = {}
    for name, declaration in declarations().items():
        if declaration.implementation in implementations.values() and not declaration.variants:
            continue  # a preset, whose row is that of the first
        implementations[f"`{name}`"] = declaration.implementation
        variants = declaration.variants.items()
        implementations |= {f"`{name}`, {variant}": one.implementation for variant, one in variants}
    for name, implementation in implementations.items():
        module, _, cls = implementation.partition(":")
        bases = getattr(import_module(module), cls).__mro__
        own = bases[: bases.index(Strategy)]
        found = [f"`{entry}`" for entry in ENTRIES if any(entry in vars(one) for one in own)]
        rows.append(f"| {name} | {', '.join(found) or 'none'} |")
    return "\n".join(rows)


def test_the_table_is_what_the_code_says(repository: Path) -> None:
    assert table() in (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
