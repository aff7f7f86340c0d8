"""Gossip over a graph: options and abilities, and the graphs themselves (plain lists, no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field

from drivetrain.declaration import Conflict, Declaration, Plan, Support
from drivetrain.dependent_options import among_workers

GRAPHS = ("ring", "exponential", "full", "edges")
WEIGHTS = ("metropolis", "uniform")


@dataclass(frozen=True)
class GossipOptions:
    """Options of ``strategy=gossip``.

    Attributes:
        graph: ``"ring"``, ``"exponential"`` (rank i hears the ranks 1, 2, 4, ... before it), ``"full"``, or
            ``"edges"`` for a graph of one's own.
        edges: pairs of ranks that hear each other, for ``graph=edges``.
        weights: ``"metropolis"`` (1 / (1 + the larger degree of both ends)) or ``"uniform"`` (1 / (1 + degree), for
            graphs whose ranks all have the same degree).
        period: local steps between two exchanges.
    """

    graph: str = "ring"
    edges: list[list[int]] = field(default_factory=list)
    weights: str = "metropolis"
    period: int = 1


def sources(graph: str, edges: list[list[int]], size: int) -> list[list[int]]:
    """For each of ``size`` ranks the rising ranks that it hears, without itself."""
    if graph == "full":
        return [[j for j in range(size) if j != i] for i in range(size)]
    if graph == "ring":
        return [sorted({(i - 1) % size, (i + 1) % size} - {i}) for i in range(size)]
    if graph == "exponential":
        hops = [1 << k for k in range(max(size - 1, 0).bit_length())]
        return [sorted({(i - hop) % size for hop in hops if hop < size} - {i}) for i in range(size)]
    heard: list[set[int]] = [set() for _ in range(size)]
    for a, b in edges:
        heard[a].add(b)
        heard[b].add(a)
    return [sorted(ranks - {i}) for i, ranks in enumerate(heard)]


def mixing_matrix(heard: list[list[int]], weights: str) -> list[list[float]]:
    """Row i: the weights of all ranks in rank i's new value. Rows and columns sum to one."""
    size = len(heard)
    matrix = [[0.0] * size for _ in range(size)]
    for i, ranks in enumerate(heard):
        for j in ranks:
            matrix[i][j] = 1 / (1 + (len(ranks) if weights == "uniform" else max(len(ranks), len(heard[j]))))
        matrix[i][i] = 1 - sum(matrix[i])
    return matrix


def is_connected(heard: list[list[int]]) -> bool:
    """Whether what any rank knows reaches all; the graphs here have as many hearers as heard, so one start will do."""
    reached, ahead = {0}, [0]
    while ahead:
        for rank in heard[ahead.pop()]:
            if rank not in reached:
                reached.add(rank)
                ahead.append(rank)
    return len(reached) == len(heard)


def check_gossip(plan: Plan) -> list[Conflict]:
    options, size = plan.options, plan.world_size
    if options is None:
        return []
    if options.graph not in GRAPHS:
        return [Conflict(f"strategy.graph={options.graph}: use one of {', '.join(GRAPHS)}.")]
    if options.weights not in WEIGHTS:
        return [Conflict(f"strategy.weights={options.weights}: use one of {', '.join(WEIGHTS)}.")]
    if options.period < 1:
        return [Conflict(f"strategy.period={options.period}: give the steps between two exchanges, at least 1.")]
    if options.edges and options.graph != "edges":
        return [Conflict(f"strategy.edges does not go with graph={options.graph}: set strategy.graph=edges.")]
    for edge in options.edges:
        if len(edge) != 2 or edge[0] == edge[1] or not all(0 <= rank < size for rank in edge):
            return [Conflict(f"strategy.edges has {list(edge)}: give pairs of different ranks from 0 to {size - 1}.")]
    heard = sources(options.graph, options.edges, size)
    if not is_connected(heard):
        return [
            Conflict(
                f"strategy.edges does not connect the {size} workers, so they would never agree: add edges, or set"
                " strategy.graph=ring."
            )
        ]
    if options.weights == "uniform" and len({len(ranks) for ranks in heard}) > 1:
        return [
            Conflict(
                "strategy.weights=uniform would not keep the mean on a graph whose ranks have different numbers of"
                " neighbours: set strategy.weights=metropolis."
            )
        ]
    return []


GOSSIP = Declaration(
    name="gossip",
    summary="replicas exchange weights with their neighbours in a graph (D-PSGD): ring, exponential, full or your own",
    implementation="drivetrain_plugins.strategies.gossip:Gossip",
    options=GossipOptions,
    support=Support(
        fidelity="graph=full with period=1 is exact; else each exchange preserves the mean of the replicas and shrinks"
        " their distance from it by the second singular value of the graph's weights",
        exact_with={"graph": "full"},
        closures=False,
    ),
    check=check_gossip,
    dependents=among_workers("graph", "weights", "period"),
)
