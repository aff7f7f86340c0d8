"""``strategy=pipeline``: the network is cut into consecutive stages, one or more for each rank. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.declaration import ALL_PRECISIONS, Conflict, Declaration, Plan, Support
from drivetrain.dependent_options import Dependent
from drivetrain_plugins.strategies.declared.explained import ELSEWHERE

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")


@dataclass(frozen=True)
class PipelineOptions:
    """Options of the pipeline.

    Attributes:
        schedule: ``gpipe`` (Huang et al., 2019: all forward passes, then all backward passes), ``1f1b`` (PipeDream-
            Flush, Narayanan et al., 2021: as few activations alive as there are stages ahead) or
            ``interleaved_1f1b`` (Narayanan et al., 2021: several stages on each rank, smaller bubble).
        microbatches: pieces that a rank's batch is cut into; a batch that does not divide gets a smaller last piece.
        virtual_stages: stages on each rank for ``interleaved_1f1b``.
        network: attribute of the module that is cut (``"net"``, ``"model.backbone"``); null finds the one child that
            has the parameters.
    """

    schedule: str = "gpipe"
    microbatches: int = 4
    virtual_stages: int = 2
    network: str | None = None


def interleaves(microbatches: int, ranks: int) -> bool:
    """Whether interleaved 1F1B takes that many: rounds of at least ``ranks`` micro-batches must be equally long."""
    return microbatches % max(1, microbatches // ranks) == 0


def _check(plan: Plan) -> list[Conflict]:
    options = plan.options
    if options is None:
        return []
    if options.schedule not in SCHEDULES:
        return [Conflict(f"strategy.schedule={options.schedule}: use one of {', '.join(SCHEDULES)}.")]
    found = []
    if options.microbatches < 1:
        found.append(Conflict(f"strategy.microbatches={options.microbatches}: give a number of at least 1, such as 4."))
    elif options.schedule == "1f1b" and options.microbatches < plan.world_size:
        found.append(
            Conflict(
                f"strategy.schedule=1f1b needs at least as many microbatches as the {plan.world_size} stages: set"
                f" strategy.microbatches={plan.world_size} or strategy.schedule=gpipe."
            )
        )
    elif options.schedule == "interleaved_1f1b" and plan.world_size == 1:
        found.append(
            Conflict("strategy.schedule=interleaved_1f1b interleaves ranks, and a pipeline of 1 has none: use gpipe.")
        )
    elif options.schedule == "interleaved_1f1b" and not interleaves(options.microbatches, plan.world_size):
        more = -(-options.microbatches // plan.world_size) * plan.world_size
        found.append(
            Conflict(
                f"strategy.schedule=interleaved_1f1b cannot spread {options.microbatches} microbatches over"
                f" {plan.world_size} ranks evenly: set strategy.microbatches={more}."
            )
        )
    if options.virtual_stages < 1:
        found.append(Conflict(f"strategy.virtual_stages={options.virtual_stages}: give at least 1, such as 2."))
    if plan.batch != "global":
        found.append(
            Conflict(
                f"strategy={plan.strategy} sends one batch through all ranks: set trainer.batch=global instead of"
                f" {plan.batch}."
            )
        )
    return found


# Of a pipeline, wherever there is one.
OF_STAGES = (Dependent("virtual_stages", {".schedule": "interleaved_1f1b"}),)
PIPELINE = Declaration(
    name="pipeline",
    summary="consecutive stages of the network on different ranks, micro-batches flowing through them",
    implementation="drivetrain_plugins.strategies.pipeline:Pipeline",
    options=PipelineOptions,
    support=Support(
        explains=ELSEWHERE,
        precisions=ALL_PRECISIONS - {"16-mixed"},
        manual_optimization=False,
        several_optimizers=False,
        closures=False,
        compile=False,
        min_world_size=2,
    ),
    check=_check,
    dependents=OF_STAGES,
)
