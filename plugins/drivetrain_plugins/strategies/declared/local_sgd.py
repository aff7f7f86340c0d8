"""Local SGD and DiLoCo: options and abilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.declaration import Conflict, Declaration, Plan, Support
from drivetrain.dependent_options import Dependent

OUTERS = ("average", "nesterov")


@dataclass(frozen=True)
class LocalSGDOptions:
    """Options of ``strategy=local_sgd``.

    Attributes:
        period: local steps between two averages.
        outer: ``"average"`` (the mean of the weights is what all go on from) or ``"nesterov"`` (DiLoCo: the mean is a
            gradient for an outer optimizer with Nesterov momentum).
        outer_lr: learning rate of ``outer=nesterov``.
        outer_momentum: momentum of ``outer=nesterov``.
    """

    period: int = 16
    outer: str = "average"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9


def check_local_sgd(plan: Plan) -> list[Conflict]:
    options = plan.options
    if options is None:
        return []
    found = []
    if options.period < 1:
        found.append(f"strategy.period={options.period}: give the local steps between two averages, at least 1.")
    if options.outer not in OUTERS:
        found.append(f"strategy.outer={options.outer}: use one of {', '.join(OUTERS)}.")
    if options.outer_lr <= 0:
        found.append(f"strategy.outer_lr={options.outer_lr}: give a rate above 0, such as 0.7.")
    if not 0 <= options.outer_momentum < 1:
        found.append(f"strategy.outer_momentum={options.outer_momentum}: give a number from 0 to below 1, such as 0.9.")
    return [Conflict(what) for what in found]


def _averages(plan: Plan, own: Mapping[str, Any]) -> bool:
    """The mean of one replica is itself, which Nesterov's momentum moves on all the same."""
    return plan.world_size > 1 or own["outer"] != "average"


LOCAL_SGD = Declaration(
    name="local_sgd",
    summary="local steps on every rank, weights averaged every `period` steps; outer=nesterov is DiLoCo",
    implementation="drivetrain_plugins.strategies.local_sgd:LocalSGD",
    options=LocalSGDOptions,
    support=Support(
        fidelity="period=1 with outer=average is exact for every optimizer; else replicas are equal after each average,"
        " and between averages the mean of the replicas moves, under SGD, by the mean of the gradients at their places",
        exact_with={"period": 1},
        closures=False,
    ),
    check=check_local_sgd,
    dependents=(
        Dependent("outer_lr", {".outer": "nesterov"}),
        Dependent("outer_momentum", {".outer": "nesterov"}),
        Dependent("period", {"devices": 2}, _averages),
    ),
)
