"""Fully sharded data parallelism, as the registry knows it."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.declaration import ALL_PRECISIONS, Conflict, Declaration, Plan, Support
from drivetrain.dependent_options import Dependent, among_workers
from drivetrain_plugins.strategies.declared.explained import GATHERED


@dataclass(frozen=True)
class FullyShardedOptions:
    """Options of ``fsdp``.

    Attributes:
        wrap: names of the module classes that are gathered one at a time, with commas between; ``auto``: the classes
            of the items of every ``nn.ModuleList`` and of an ``nn.Sequential`` of blocks.
        reshard_after_forward: free a block's gathered weights after its forward pass and gather them again for
            backward: less memory, more traffic.
        reduce_every_micro_batch: reduce gradients after every micro-batch of a window, so that only shards of them are
            kept; ``False`` reduces once a step and keeps whole gradients meanwhile.
        narrow_gather: under ``bf16-mixed``, gather the matrices of blocks in bf16, in messages apart from the vectors,
            which stay in fp32: half the bytes in more messages, which pays where the links are slow.
    """

    wrap: str = "auto"
    reshard_after_forward: bool = True
    reduce_every_micro_batch: bool = True
    narrow_gather: bool = False


def _check(plan: Plan) -> list[Conflict]:
    if plan.options is not None and not plan.options.wrap.strip(", "):
        return [Conflict("strategy.wrap is empty: name module classes with commas between, or write auto.")]
    return []


# Of what is cut into shards, wherever that is.
OF_SHARDS = (Dependent("narrow_gather", {"precision": "bf16-mixed"}),)
FSDP = Declaration(
    name="fsdp",
    summary="parameters, gradients and optimizer states in shards, gathered block by block (FSDP2)",
    implementation="drivetrain_plugins.strategies.fsdp:FullySharded",
    options=FullyShardedOptions,
    support=Support(
        precisions=ALL_PRECISIONS - {"16-mixed"},
        closures=False,
        divides=True,
        explains=GATHERED,
    ),
    check=_check,
    dependents=(
        *OF_SHARDS,
        *among_workers("wrap", "reshard_after_forward", "reduce_every_micro_batch", "narrow_gather"),
    ),
)
