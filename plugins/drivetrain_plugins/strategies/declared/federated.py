"""Federated learning: options and abilities."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.declaration import ALL_PRECISIONS, Conflict, Declaration, Plan, Support
from drivetrain.dependent_options import Dependent

ALGORITHMS = ("fedavg", "fedprox")
PARTITIONS = ("iid", "dirichlet")


@dataclass(frozen=True)
class FederatedOptions:
    """Options of ``strategy=federated``.

    Attributes:
        algorithm: ``"fedavg"`` or ``"fedprox"``.
        mu: weight of FedProx's term, mu / 2 times the squared distance from the round's first weights.
        clients: number of clients that the training data is divided among.
        fraction: part of the clients that takes part in a round.
        clients_per_round: their number, instead of ``fraction``.
        local_epochs: passes of a client over its data in a round.
        local_steps: optimizer steps of a client in a round, instead of ``local_epochs``.
        batch_size: samples of a client's batch; None for the loader's.
        partition: ``"iid"``, or ``"dirichlet"`` for clients with different labels.
        alpha: concentration of the Dirichlet distribution; small for few labels a client.
        labels: attribute of the data set, or ``"module:function"`` of it, that gives the labels; None to find them.
        min_samples: fewest samples of a client in a Dirichlet partition; who draws fewer gets some of the largest's.
    """

    algorithm: str = "fedavg"
    mu: float = 0.01
    clients: int = 10
    fraction: float = 1.0
    clients_per_round: int | None = None
    local_epochs: int = 1
    local_steps: int | None = None
    batch_size: int | None = None
    partition: str = "iid"
    alpha: float = 0.5
    labels: str | None = None
    min_samples: int = 1

    @property
    def count(self) -> int:
        """Clients in a round."""
        if self.clients_per_round is not None:
            return self.clients_per_round
        return max(1, round(self.fraction * self.clients))


def check_federated(plan: Plan) -> list[Conflict]:
    options = plan.options
    if options is None:
        return []
    found = []
    if options.algorithm not in ALGORITHMS:
        found.append(f"strategy.algorithm={options.algorithm}: use one of {', '.join(ALGORITHMS)}.")
    if options.partition not in PARTITIONS:
        found.append(f"strategy.partition={options.partition}: use one of {', '.join(PARTITIONS)}.")
    for name in ("clients", "clients_per_round", "local_epochs", "local_steps", "batch_size", "min_samples"):
        value = getattr(options, name)
        if value is not None and value < 1:
            found.append(f"strategy.{name}={value}: give a number of at least 1.")
    if not 0 < options.fraction <= 1:
        found.append(f"strategy.fraction={options.fraction}: give a part above 0 and up to 1 of the clients.")
    if (options.clients_per_round or 0) > options.clients:
        found.append(
            f"strategy.clients_per_round={options.clients_per_round} is more than the {options.clients} clients that"
            f" there are: set it to at most {options.clients}, or raise strategy.clients."
        )
    if options.mu < 0:
        found.append(f"strategy.mu={options.mu}: give a weight of at least 0.")
    if options.alpha <= 0:
        found.append(f"strategy.alpha={options.alpha}: give a concentration above 0, such as 0.5.")
    return [Conflict(what) for what in found]


FEDERATED = Declaration(
    name="federated",
    summary="rounds of clients with data of their own: FedAvg, FedProx; a round is an epoch",
    implementation="drivetrain_plugins.strategies.federated:Federated",
    options=FederatedOptions,
    support=Support(
        fidelity="a round depends on seed and round only, not on the number of ranks; under plain SGD, with all clients"
        " and one local step on all of their data, it is one step of ddp on the whole data set",
        exact_with=None,
        # Loss scales would follow the clients of a rank, and so the number of ranks.
        precisions=ALL_PRECISIONS - {"16-mixed"},
        closures=False,
        rounds=True,
    ),
    check=check_federated,
    dependents=(
        Dependent("mu", {".algorithm": "fedprox"}),
        Dependent("fraction", {".clients_per_round": None}),
        Dependent("local_epochs", {".local_steps": None}),
        *(Dependent(option, {".partition": "dirichlet"}) for option in ("alpha", "labels", "min_samples")),
    ),
)
