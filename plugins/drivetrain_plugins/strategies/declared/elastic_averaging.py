"""Elastic averaging of weights, or of gradients: options and abilities."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.declaration import Conflict, Declaration, Plan, Support
from drivetrain.dependent_options import Dependent, among_workers

MIXES = ("weights", "gradients")


@dataclass(frozen=True)
class ElasticAveragingOptions:
    """Options of ``strategy=elastic_averaging``.

    Attributes:
        mix: ``"weights"`` (EASGD: replicas and a centre attract each other) or ``"gradients"`` (each rank steps with
            ``local * own + (1 - local) * global`` gradient).
        period: steps between two moves of ``mix=weights``.
        moving_rate: part of its distance to the centre that a replica moves; None for 0.9 over the number of ranks.
        local: weight of a rank's own gradient in ``mix=gradients``; 0 is exact.
    """

    mix: str = "weights"
    period: int = 10
    moving_rate: float | None = None
    local: float = 0.5


def check_elastic_averaging(plan: Plan) -> list[Conflict]:
    options = plan.options
    if options is None:
        return []
    found = []
    if options.mix not in MIXES:
        found.append(f"strategy.mix={options.mix}: use one of {', '.join(MIXES)}.")
    if options.period < 1:
        found.append(f"strategy.period={options.period}: give the steps between two moves, at least 1.")
    bound = 2 / (plan.world_size + 1)
    if options.moving_rate is not None and not 0 < options.moving_rate < bound:
        found.append(
            f"strategy.moving_rate={options.moving_rate}: with {plan.world_size} workers replicas and centre only come"
            f" together for rates above 0 and below {bound:.3g}; null gives 0.9 over the number of workers."
        )
    if not 0 <= options.local <= 1:
        found.append(f"strategy.local={options.local}: give the own gradient a weight from 0 to 1.")
    return [Conflict(what) for what in found]


ELASTIC_AVERAGING = Declaration(
    name="elastic_averaging",
    summary="replicas drawn to a centre every `period` steps (EASGD); or mix=gradients: own and global gradient mixed",
    implementation="drivetrain_plugins.strategies.elastic_averaging:ElasticAveraging",
    options=ElasticAveragingOptions,
    support=Support(
        fidelity="mix=weights: each move preserves the sum of the replicas and the centre; mix=gradients: the mean of"
        " the ranks' gradients is the global one, and local=0 is exact",
        exact_with={"mix": "gradients", "local": 0.0},
        closures=False,
    ),
    check=check_elastic_averaging,
    dependents=(
        Dependent("period", {".mix": "weights"}),
        Dependent("moving_rate", {".mix": "weights"}),
        Dependent("local", {".mix": "gradients"}),
        *among_workers("local"),
    ),
)
