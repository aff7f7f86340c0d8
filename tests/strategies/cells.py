"""Every registered strategy with the world sizes it takes here: what the tests over the registry run through."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from drivetrain.declaration import Declaration, Plan, conflicts
from drivetrain.support import SIZES, declarations


@dataclass(frozen=True)
class Cell:
    """A strategy with options, on so many workers, in the highest precision it takes."""

    declaration: Declaration
    devices: int
    variant: str = ""  # of the declaration's

    @property
    def name(self) -> str:
        return self.declaration.name

    @property
    def exact(self) -> bool:
        return self.declaration.support.exact_with is not None

    @property
    def strategy(self) -> dict[str, Any]:
        """What ``Trainer(strategy=...)`` gets."""
        return {"name": self.name, **self.options}

    @property
    def options(self) -> dict[str, Any]:
        """Those under which the run is exact, where there are any, and those that choose the variant."""
        chosen = self.declaration.variants[self.variant].options if self.variant else {}
        return {**(self.declaration.support.exact_with or {}), **chosen}

    @property
    def precision(self) -> str:
        return "64-true" if "64-true" in self.declaration.support.precisions else "32-true"

    @property
    def plan(self) -> Plan:
        options = self.declaration.options(**self.options)
        return Plan(self.name, options, world_size=self.devices, precision=self.precision)

    def takes(self, **changes: Any) -> bool:
        """Whether the plan with ``changes`` is allowed."""
        return not conflicts(replace(self.plan, **changes), self.declaration)

    def __str__(self) -> str:
        return "-".join([self.name, *([self.variant] if self.variant else []), str(self.devices)])


def cells() -> list[Cell]:
    """Every strategy and its variants at every world size of :data:`SIZES` that they take; presets of another strategy
    are left to that one."""
    every = (
        Cell(declaration, size, variant)
        for declaration in declarations().values()
        if declaration.preset_of is None
        for variant in ("", *declaration.variants)
        for size in SIZES
    )
    return [cell for cell in every if cell.takes()]


def presets() -> list[Cell]:
    """Every preset of another strategy once, on three workers."""
    return [Cell(declaration, 3) for declaration in declarations().values() if declaration.preset_of is not None]


def one_each() -> list[Cell]:
    """Every strategy and variant once: with two workers, or as few more as it takes."""
    found: dict[tuple[str, str], Cell] = {}
    for cell in cells():
        key = cell.name, cell.variant
        if key not in found or found[key].devices == 1:
            found[key] = cell
    return list(found.values())
