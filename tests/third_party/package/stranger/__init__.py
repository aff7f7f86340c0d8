"""Somebody else's strategy, as drivetrain finds it: no torch here."""

from dataclasses import dataclass

from drivetrain.declaration import Conflict, Declaration, Plan, Support


@dataclass(frozen=True)
class Options:
    """``pieces``: in how many messages the gradients travel."""

    pieces: int = 2


def check(plan: Plan) -> list[Conflict]:
    if plan.options is not None and plan.options.pieces < 1:
        return [Conflict(f"strategy.pieces={plan.options.pieces}: give at least 1.")]
    return []


BY_HAND = Declaration(
    name="by_hand",
    summary="gradients summed in a few messages after backward",
    implementation="stranger.strategy:ByHand",
    options=Options,
    support=Support(min_world_size=2, manual_optimization=False, several_optimizers=False, closures=False),
    check=check,
)
