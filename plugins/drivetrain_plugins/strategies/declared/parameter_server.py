"""The parameter server, as the registry knows it."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.declaration import ALL_PRECISIONS, Conflict, Declaration, Plan, Support
from drivetrain.errors import nearest

MODES = ("sync", "async")


@dataclass(frozen=True)
class ParameterServerOptions:
    """Options of the parameter server.

    Attributes:
        mode: ``sync``: one step per batch with the mean of all workers' gradients, exact. ``async``: every worker's
            gradient is a step of its own, as soon as it comes.
        servers: how many ranks, the last ones, hold the parameters and train nothing.
        embedded: one server in a thread beside the first worker instead; then every rank trains. The server's weights
            and the optimizer's state lie on that worker's device, beside the worker's own weights.
        max_staleness: ``async``: batches that a worker may be ahead of the slowest; null for any number.
        encrypt: CURVE keys for every connection; null: where there is more than one node, and there not to be left out.
            Without, gradients and weights go through memory that the processes of the host share.
    """

    mode: str = "sync"
    servers: int = 1
    embedded: bool = False
    max_staleness: int | None = None
    encrypt: bool | None = None


def _check(plan: Plan) -> list[Conflict]:
    o = plan.options
    if o is None:
        return []
    if o.mode not in MODES:
        return [Conflict(f"strategy.mode={o.mode}: {nearest(str(o.mode), MODES)}")]
    found = []
    if o.servers < 1:
        found.append(Conflict(f"strategy.servers={o.servers}: at least one server is needed."))
    elif o.embedded and o.servers != 1:
        found.append(
            Conflict(f"strategy.servers={o.servers} with embedded=true: beside the first worker there is one server.")
        )
    elif not o.embedded and plan.world_size <= o.servers:
        found.append(
            Conflict(
                f"strategy=parameter_server with {o.servers} server{'s' * (o.servers > 1)} leaves no worker of"
                f" {plan.world_size}: set devices={o.servers + 1} or more, or strategy.embedded=true."
            )
        )
    if o.encrypt is False and plan.num_nodes > 1:
        found.append(
            Conflict(
                f"strategy.encrypt=false over {plan.num_nodes} nodes would let whoever reaches a server's port read and"
                " change the weights: leave out strategy.encrypt, which then is on."
            )
        )
    if o.max_staleness is not None and o.mode == "sync":
        found.append(Conflict("strategy.max_staleness is for mode=async: in sync no gradient is stale."))
    elif o.max_staleness is not None and o.max_staleness < 0:
        found.append(Conflict(f"strategy.max_staleness={o.max_staleness}: give 0 or more, or null."))
    return found


PARAMETER_SERVER = Declaration(
    name="parameter_server",
    summary="servers hold the parameters and step them; workers push gradients and pull weights (ZeroMQ)",
    implementation="drivetrain_plugins.strategies.parameter_server:ParameterServer",
    options=ParameterServerOptions,
    support=Support(
        precisions=ALL_PRECISIONS - {"16-mixed"},
        manual_optimization=False,
        several_optimizers=False,
        closures=False,
    ),
    check=_check,
)
