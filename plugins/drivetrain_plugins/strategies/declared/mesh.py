"""Tensor parallelism, and meshes of two kinds of parallelism, as the registry knows them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from drivetrain.declaration import ALL_PRECISIONS, Conflict, Declaration, NoOptions, Plan, Support, Variant
from drivetrain_plugins.strategies.declared.explained import GATHERED
from drivetrain_plugins.strategies.declared.fsdp import FSDP, OF_SHARDS, FullyShardedOptions
from drivetrain_plugins.strategies.declared.pipeline import OF_STAGES, PIPELINE, PipelineOptions


@dataclass(frozen=True)
class MeshOptions(PipelineOptions, FullyShardedOptions):
    """Sizes of the mesh, whose product is the number of workers, and the options of what it is made of. Neighbouring
    ranks form a tensor group or a pipeline.

    Attributes:
        data: replicas that read different parts of the batch; -1 for what the other sizes leave.
        shard: replicas that also hold the parameters in shards (FSDP2); in place of ``data``.
        tensor: ranks among which the matrices of every block are cut; null for 2, or 1 where ``pipeline`` is given.
        pipeline: ranks that hold consecutive stages of the network, in place of ``tensor``; null for none.
    """

    data: int = -1
    shard: int = 1
    tensor: int | None = None
    pipeline: int | None = None


class Sizes(NamedTuple):
    """How many ranks there are in each dimension of a mesh."""

    data: int
    shard: int
    tensor: int
    pipeline: int


def sizes(options: MeshOptions, world_size: int) -> Sizes:
    """The sizes for so many workers; ``data`` as it was given where it cannot be worked out."""
    pipeline = 1 if options.pipeline is None else options.pipeline
    tensor = options.tensor
    if tensor is None:
        tensor = 2 if options.pipeline is None else 1
    others = options.shard * tensor * pipeline
    data = options.data
    if data == -1 and others > 0 and world_size % others == 0:
        data = world_size // others
    return Sizes(data, options.shard, tensor, pipeline)


def _check(plan: Plan) -> list[Conflict]:
    options = plan.options
    if options is None:
        return []
    found = sizes(options, plan.world_size)
    data, shard, tensor, pipeline = found
    given = f"strategy.data={options.data}, shard={shard}, tensor={tensor}, pipeline={pipeline}"
    if min(shard, tensor, pipeline) < 1 or (data < 1 and options.data != -1):
        return [Conflict(f"{given}: sizes are at least 1 (data=-1: what the others leave).")]
    if data * shard * tensor * pipeline != plan.world_size:
        return [
            Conflict(
                f"{given} do not multiply to the {plan.world_size} workers that devices gives: set devices to"
                f" {'a multiple of ' * (data < 1)}{max(data, 1) * shard * tensor * pipeline}, or other sizes."
            )
        ]
    if data > 1 and shard > 1:
        return [Conflict(f"strategy.data={data} and shard={shard}: a mesh has two dimensions, set one of them to 1.")]
    if options.pipeline is not None and (tensor > 1 or shard > 1):
        return [
            Conflict(
                f"strategy.pipeline={pipeline} goes with strategy.data only: set shard=1 and tensor=1, or leave"
                " pipeline out."
            )
        ]
    return [*_unused(options, found), *_check_parts(plan, found)]


def _unused(options: MeshOptions, found: Sizes) -> list[Conflict]:
    """Options of a kind of parallelism that this mesh has not."""
    parts: list[tuple[bool, type[Any], str]] = [
        (found.shard > 1, FullyShardedOptions, "strategy.shard above 1"),
        (options.pipeline is not None, PipelineOptions, "strategy.pipeline"),
    ]
    return [
        Conflict(f"strategy.{one.name}={getattr(options, one.name)} has a meaning with {needs} only: leave it out.")
        for used, kind, needs in parts
        for one in fields(kind)
        if not used and getattr(options, one.name) != one.default
    ]


def _check_parts(plan: Plan, found: Sizes) -> list[Conflict]:
    """What a part of the mesh would refuse by itself."""
    conflicts = list(FSDP.check(plan)) if found.shard > 1 else []
    if plan.options.pipeline is not None:
        conflicts += PIPELINE.check(replace(plan, world_size=found.pipeline))
        if plan.compile:
            conflicts.append(
                Conflict(f"strategy={plan.strategy} with pipelines does not work with compile=true: set compile=false.")
            )
    return conflicts


_SUPPORT = Support(
    precisions=ALL_PRECISIONS - {"16-mixed"},
    manual_optimization=False,
    several_optimizers=False,
    closures=False,
    min_world_size=2,
    divides=True,
    explains=GATHERED,
)


def _has_a_pipeline(options: MeshOptions) -> bool:
    return options.pipeline is not None


TENSOR_PARALLEL = Declaration(
    name="tensor_parallel",
    summary="the matrices of every block cut among the ranks (Megatron); all ranks see every sample",
    implementation="drivetrain_plugins.strategies.mesh:TensorParallel",
    options=NoOptions,
    support=_SUPPORT,
)
MESH = Declaration(
    name="mesh",
    summary="two kinds at once: data or shard x tensor, data x pipeline",
    implementation="drivetrain_plugins.strategies.mesh:Mesh",
    options=MeshOptions,
    support=_SUPPORT,
    check=_check,
    dependents=(*OF_SHARDS, *OF_STAGES),
    variants={
        "pipelines": Variant(
            options={"data": 2, "pipeline": 2},
            implementation="drivetrain_plugins.strategies.pipeline_mesh:PipelineMesh",
            chosen=_has_a_pipeline,
        )
    },
)
