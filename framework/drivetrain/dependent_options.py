"""Options that have an effect in some runs only: how a part declares them, and what a user is told who set one in vain.

A strategy, compressor or callback names each such option and what gives it an effect; the Trainer's own arguments are
in :mod:`drivetrain.dependent_arguments`. Nothing else knows of them. Plain data, no torch.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

from drivetrain.errors import IdleOptionWarning

if TYPE_CHECKING:
    from drivetrain.declaration import Plan

OWN = "."  # what a key begins with that is an option of the same part


@dataclass(frozen=True)
class Dependent:
    """An option that has an effect in some runs only.

    Attributes:
        option: its name within its part.
        needs: what gives it an effect: values by key. ``".outer"`` is an option of the same part; others are arguments
            of the Trainer, or ``devices``, ``precision``, ``task``, ... as the command line has them.
        active: whether it has one, from the plan and the part's own options by name; None: where all that ``needs``
            names has just these values. In a declaration it has a name, so that a Trainer can be pickled.
        trains: whether it is one of training, of which a run that only evaluates is not told: the command that trained
            goes on to it with ``task=test``.
    """

    option: str
    needs: Mapping[str, Any]
    active: Callable[[Plan, Mapping[str, Any]], bool] | None = None
    trains: bool = True


@dataclass(frozen=True)
class Part:
    """What a run has options of.

    Attributes:
        dependents: those of its options that may be without effect.
        values, defaults: its options by name, as they are and as they are where nobody sets them.
        where: what they are written after, such as ``"strategy"``; empty for nothing.
    """

    dependents: tuple[Dependent, ...]
    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    where: str = ""

    def full(self, key: str, names: Mapping[str, str]) -> str:
        """``key`` as the user writes it."""
        own = key.startswith(OWN)
        key = key.removeprefix(OWN)
        return f"{self.where}.{key}" if own and self.where else names.get(key, key)


def of_options(where: str, options: Any, dependents: tuple[Dependent, ...]) -> Part:
    """The part whose ``options`` are a dataclass, filled in; None for one that has none."""
    listed = [] if options is None else fields(options)
    defaults = {one.name: one.default if one.default_factory is MISSING else one.default_factory() for one in listed}
    return Part(dependents, {one.name: getattr(options, one.name) for one in listed}, defaults, where)


def among_workers(*options: str) -> tuple[Dependent, ...]:
    """Those of ``options`` that say how workers exchange something, and mean nothing to one that is alone."""
    return tuple(Dependent(option, {"devices": 2}, _several_workers) for option in options)


def _several_workers(plan: Plan, own: Mapping[str, Any]) -> bool:
    return plan.world_size > 1


_FIELDS = {"accumulate_grad_batches": "accumulation"}  # of a plan, where they have another name than the argument


def in_vain(plan: Plan, parts: Iterable[Part], names: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each option that is away from its default and has no effect in this run.

    Args:
        names: what the command line calls the Trainer's arguments, where it has other names.
    """
    trains = not plan.stages or "fit" in plan.stages
    found: list[str] = []
    names = names or {}
    for part in parts:
        for one in part.dependents:
            # A class may take other arguments than the one that it has the declaration from.
            own = {one.option, *(key[len(OWN) :] for key in one.needs if key.startswith(OWN))}
            if not own <= part.values.keys() or (one.trains and not trains):
                continue
            value = part.values[one.option]
            given = f"{part.full(OWN + one.option, names)}={_shown(value)}"
            known = value == part.defaults.get(one.option) or any(said.startswith(f"{given} ") for said in found)
            if known or _has_effect(one, plan, part):
                continue
            idle = [key for key, needed in one.needs.items() if _present(key, plan, part) != needed]
            present = " and ".join(f"{part.full(key, names)}={_shown(_present(key, plan, part))}" for key in idle)
            wanted = " and ".join(f"{part.full(key, names)}={_shown(one.needs[key])}" for key in idle)
            found.append(f"{given} has no effect with {present}: set {wanted}, or leave it out.")
    return found


def tell(sentences: Iterable[str]) -> None:
    """Warn of each."""
    for sentence in sentences:
        warnings.warn(sentence, IdleOptionWarning, stacklevel=2)


def _has_effect(one: Dependent, plan: Plan, part: Part) -> bool:
    if one.active is not None:
        return one.active(plan, part.values)
    return all(_present(key, plan, part) == needed for key, needed in one.needs.items())


def _present(key: str, plan: Plan, part: Part) -> Any:
    """What ``key`` is in this run."""
    if key.startswith(OWN):
        return part.values[key[len(OWN) :]]
    if key == "devices":
        return plan.world_size // plan.num_nodes
    name = _FIELDS.get(key, key)
    return getattr(plan, name) if hasattr(plan, name) else plan.arguments.get(key)


def _shown(value: Any) -> str:
    return str(value) if value is not None and not isinstance(value, bool) else json.dumps(value)
