"""The built-in strategies as the registry knows them. No torch here: implementations are imported in workers only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from drivetrain import registry
from drivetrain.declaration import ANY_COMPRESSOR, Conflict, Declaration, Plan, Support
from drivetrain.dependent_options import among_workers
from drivetrain.errors import nearest


@dataclass(frozen=True)
class ReplicatedOptions:
    """Options of strategies that hold a whole copy of the module on every rank.

    Attributes:
        bucket_cap_mb: gradients travel in buckets of about this many MB, the first as soon as it is full.
        find_unused_parameters: allow parameters that a step does not use; costs a walk over the graph per step.
        static_graph: promise that every step uses the same parameters in the same order.
        gradient_as_bucket_view: gradients live in the buckets, which saves their memory once.
        topology: how the gradients are summed: native (the backend's own all-reduce), auto (what a calibration of the
            machine says is fastest for each bucket, else native), or a registered topology such as ring or tree.
    """

    bucket_cap_mb: float = 25.0
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    topology: str = "native"


@dataclass(frozen=True)
class RingOptions(ReplicatedOptions):
    topology: str = "ring"


@dataclass(frozen=True)
class TreeOptions(ReplicatedOptions):
    topology: str = "tree"


@dataclass(frozen=True)
class HalvingDoublingOptions(ReplicatedOptions):
    topology: str = "halving_doubling"


@dataclass(frozen=True)
class HierarchicalOptions(ReplicatedOptions):
    topology: str = "hierarchical"


def _check_replicated(plan: Plan) -> list[Conflict]:
    options, found = plan.options, []
    if options is not None and options.bucket_cap_mb <= 0:
        found.append(f"strategy.bucket_cap_mb={options.bucket_cap_mb}: give a size above 0, such as 25.")
    if options is not None and options.find_unused_parameters and plan.compression != "none":
        found.append(
            f"compression={plan.compression} would send what it owes of a parameter that the step does not use: set"
            " strategy.find_unused_parameters=false or compression=none."
        )
    if options is not None and options.static_graph and plan.accumulation > 1 and plan.world_size > 1:
        found.append(
            f"accumulate_grad_batches={plan.accumulation} begins with a pass that is not synchronised, in which torch"
            " cannot learn a static graph: set strategy.static_graph=false or accumulate_grad_batches=1."
        )
    known = ["native", "auto", *registry.names("topologies")]
    if options is not None and options.topology not in known:
        found.append(f"there is no strategy.topology={options.topology}: {nearest(options.topology, known)}")
    return [Conflict(sentence) for sentence in found]


def _preset(name: str, summary: str, options: type[ReplicatedOptions], stands_in: str | None = None) -> Declaration:
    """``ddp`` with one topology, under the topology's name."""
    return Declaration(
        name=name,
        summary=summary,
        implementation=DDP.implementation,
        options=options,
        support=_REPLICATED,
        check=partial(_check_preset, name, options().topology),
        dependents=_OF_BUCKETS,
        preset_of=stands_in,
    )


def _check_preset(name: str, own: str, plan: Plan) -> list[Conflict]:
    other = own if plan.options is None else plan.options.topology
    if other != own:
        return [Conflict(f"strategy={name} is strategy=ddp with topology={own}: for {other}, set strategy=ddp.")]
    return _check_replicated(plan)


_REPLICATED = Support(compressors=ANY_COMPRESSOR, thaws=True, editable=True, replicated=True)
_OF_BUCKETS = among_workers(
    "bucket_cap_mb", "find_unused_parameters", "static_graph", "gradient_as_bucket_view", "topology"
)


SINGLE = Declaration(
    name="single",
    summary="one process on one device",
    implementation="drivetrain_plugins.strategies.single:Single",
    support=Support(max_world_size=1, thaws=True, editable=True, replicated=True),
)
DDP = Declaration(
    name="ddp",
    summary="a copy on every rank, gradients averaged by the backend's own all-reduce",
    implementation="drivetrain_plugins.strategies.ddp:DistributedDataParallelStrategy",
    options=ReplicatedOptions,
    support=_REPLICATED,
    check=_check_replicated,
    dependents=_OF_BUCKETS,
)
# ring is tested like every strategy; the others differ from it in the topology alone, whose sums are tested in comm.
RING = _preset("ring", "a copy on every rank, gradients averaged by a bandwidth-optimal ring all-reduce", RingOptions)
TREE = _preset(
    "tree", "a copy on every rank, gradients averaged along a binomial tree, in few rounds", TreeOptions, "ring"
)
HALVING_DOUBLING = _preset(
    "halving_doubling",
    "a copy on every rank, gradients averaged by recursive halving and doubling: a ring's bytes in fewer rounds",
    HalvingDoublingOptions,
    "ring",
)
HIERARCHICAL = _preset(
    "hierarchical",
    "a copy on every rank, gradients averaged inside hosts first, so that little crosses the links between them",
    HierarchicalOptions,
    "ring",
)
