"""``strategy=zero``: DeepSpeed's ZeRO, stages 0 to 3. Neither torch nor DeepSpeed is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from drivetrain.declaration import Conflict, Declaration, Plan, Support
from drivetrain.dependent_options import Dependent, among_workers
from drivetrain_plugins.strategies.declared.explained import EMPTY

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class ZeroOptions:
    """Options of ZeRO (Rajbhandari et al., 2020).

    Attributes:
        stage: what the ranks share out: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.
        bucket_size: elements of the gradient that are reduced in one message.
        persistence_threshold: in stage 3, parameters of fewer elements than this stay whole on every rank.
        narrow_gather: under ``bf16-mixed``, reduce the gradients of linear and convolutional layers in bf16 and, in
            stage 3, gather their weights in it (DeepSpeed's ``torch_autocast``): half the bytes, rounded sums.
    """

    stage: int = 1
    bucket_size: int = 50_000_000
    persistence_threshold: int = 100_000
    narrow_gather: bool = False


def _check(plan: Plan) -> list[Conflict]:
    found = []
    if find_spec("deepspeed") is None:
        found.append(Conflict(f"strategy={plan.strategy} needs DeepSpeed: pip install 'deepspeed>=0.19'"))
    options = plan.options
    if options is None:
        return found
    if options.stage not in STAGES:
        found.append(Conflict(f"strategy.stage={options.stage}: use one of 0, 1, 2, 3."))
    if options.bucket_size < 1:
        found.append(Conflict(f"strategy.bucket_size={options.bucket_size}: give elements, such as 50000000."))
    if options.narrow_gather and not options.stage:
        found.append(Conflict("strategy.narrow_gather=true needs strategy.stage=1 or more."))
    if options.persistence_threshold < 0:
        found.append(
            Conflict(f"strategy.persistence_threshold={options.persistence_threshold}: give 0 or more elements.")
        )
    return found


def _has_buckets(plan: Plan, own: Mapping[str, Any]) -> bool:
    return bool(own["stage"] > 0)


ZERO = Declaration(
    name="zero",
    summary="optimizer states, gradients and parameters shared out among the ranks, by DeepSpeed",
    implementation="drivetrain_plugins.strategies.zero:Zero",
    options=ZeroOptions,
    support=Support(
        tolerance=1e-6,
        precisions=frozenset({"32-true", "bf16-mixed"}),
        clipping=frozenset({"norm"}),
        manual_optimization=False,
        several_optimizers=False,
        closures=False,
        compile=False,
        divides=True,
        explains=EMPTY,
    ),
    check=_check,
    dependents=(
        Dependent("bucket_size", {".stage": 1}, _has_buckets),
        Dependent("persistence_threshold", {".stage": 3}),
        *among_workers("persistence_threshold"),
        Dependent("narrow_gather", {"precision": "bf16-mixed"}),
    ),
)
