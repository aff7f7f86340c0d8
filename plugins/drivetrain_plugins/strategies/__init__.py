"""The built-in strategies as the registry knows them. No torch here: implementations are imported in workers only."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.declaration import ANY_COMPRESSOR, Conflict, Declaration, Plan, Support


@dataclass(frozen=True)
class ReplicatedOptions:
    """Options of strategies that hold a whole copy of the module on every rank.

    Attributes:
        bucket_cap_mb: gradients travel in buckets of about this many MB, the first as soon as it is full.
        find_unused_parameters: allow parameters that a step does not use; costs a walk over the graph per step.
        static_graph: promise that every step uses the same parameters in the same order.
        gradient_as_bucket_view: gradients live in the buckets, which saves their memory once.
    """

    bucket_cap_mb: float = 25.0
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True


def _check_replicated(plan: Plan) -> list[Conflict]:
    options, found = plan.options, []
    if options is not None and options.bucket_cap_mb <= 0:
        found.append(f"strategy.bucket_cap_mb={options.bucket_cap_mb}: give a size above 0, such as 25.")
    if options is not None and options.find_unused_parameters and plan.compression != "none":
        found.append(
            f"compression={plan.compression} would send what it owes of a parameter that the step does not use: set"
            " strategy.find_unused_parameters=false or compression=none."
        )
    return [Conflict(sentence) for sentence in found]


_REPLICATED = Support(compressors=ANY_COMPRESSOR, thaws=True, editable=True)


SINGLE = Declaration(
    name="single",
    summary="one process on one device",
    implementation="drivetrain_plugins.strategies.single:Single",
    support=Support(max_world_size=1, thaws=True, editable=True),
)
DDP = Declaration(
    name="ddp",
    summary="a copy on every rank, gradients averaged by the backend's own all-reduce",
    implementation="drivetrain_plugins.strategies.ddp:DistributedDataParallelStrategy",
    options=ReplicatedOptions,
    support=_REPLICATED,
    check=_check_replicated,
)
RING = Declaration(
    name="ring",
    summary="a copy on every rank, gradients averaged by a bandwidth-optimal ring all-reduce",
    implementation="drivetrain_plugins.strategies.ring:Ring",
    options=ReplicatedOptions,
    support=_REPLICATED,
    check=_check_replicated,
)
