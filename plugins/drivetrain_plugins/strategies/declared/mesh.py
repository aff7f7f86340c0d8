"""Tensor parallelism, and meshes of two kinds of parallelism, as the registry knows them."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.declaration import ALL_PRECISIONS, Conflict, Declaration, NoOptions, Plan, Support


@dataclass(frozen=True)
class MeshOptions:
    """Sizes of the mesh; their product is the number of workers. Neighbouring ranks form a tensor group.

    Attributes:
        data: replicas that read different parts of the batch; -1 for what the other sizes leave.
        shard: replicas that also hold the parameters in shards (FSDP2); in place of ``data``.
        tensor: ranks among which the matrices of every block are cut.
    """

    data: int = -1
    shard: int = 1
    tensor: int = 2


def sizes(options: MeshOptions, world_size: int) -> tuple[int, int, int]:
    """``(data, shard, tensor)`` for so many workers; ``data`` as it was given where it cannot be worked out."""
    others = options.shard * options.tensor
    data = options.data
    if data == -1 and others > 0 and world_size % others == 0:
        data = world_size // others
    return data, options.shard, options.tensor


def _check(plan: Plan) -> list[Conflict]:
    if plan.options is None:
        return []
    data, shard, tensor = sizes(plan.options, plan.world_size)
    given = f"strategy.data={plan.options.data}, shard={shard}, tensor={tensor}"
    if min(shard, tensor) < 1 or (data < 1 and plan.options.data != -1):
        return [Conflict(f"{given}: sizes are at least 1 (data=-1: what the others leave).")]
    if data * shard * tensor != plan.world_size:
        return [
            Conflict(
                f"{given} do not multiply to the {plan.world_size} workers that devices gives: set devices to a"
                f" multiple of {shard * tensor}, or other sizes."
            )
        ]
    if data > 1 and shard > 1:
        return [Conflict(f"strategy.data={data} and shard={shard}: a mesh has two dimensions, set one of them to 1.")]
    return []


_SUPPORT = Support(
    precisions=ALL_PRECISIONS - {"16-mixed"},
    manual_optimization=False,
    several_optimizers=False,
    closures=False,
    min_world_size=2,
)

TENSOR_PARALLEL = Declaration(
    name="tensor_parallel",
    summary="the matrices of every block cut among the ranks (Megatron); all ranks see every sample",
    implementation="drivetrain_plugins.strategies.mesh:TensorParallel",
    options=NoOptions,
    support=_SUPPORT,
)
MESH = Declaration(
    name="mesh",
    summary="two kinds at once: data or shard x tensor",
    implementation="drivetrain_plugins.strategies.mesh:Mesh",
    options=MeshOptions,
    support=_SUPPORT,
    check=_check,
)
