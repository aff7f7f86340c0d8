"""Which of the Trainer's arguments, and of a command's own, have an effect in some runs only. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.declaration import Plan
from drivetrain.dependent_options import Dependent, among_workers

Active = Callable[[Plan, Mapping[str, Any]], bool]


def _read_in(stage: str) -> Active:
    """A stage of the command's task; a Trainer may be asked for any stage later."""
    return lambda plan, own: "task" not in own or stage in plan.stages


def _validates(plan: Plan, own: Mapping[str, Any]) -> bool:
    return own["limit_val_batches"] != 0


def _checks(plan: Plan, own: Mapping[str, Any]) -> bool:
    return own["num_sanity_val_steps"] == 0 or _validates(plan, own)


def _evaluates(plan: Plan, own: Mapping[str, Any]) -> bool:
    return "task" not in own or bool(set(plan.stages) - {"fit"}) or _validates(plan, own)


def _several_nodes(plan: Plan, own: Mapping[str, Any]) -> bool:
    """Or a command whose workers torchrun or mpirun started: they meet by it on one node, too."""
    return plan.num_nodes > 1 or bool(own.get("joined"))


def _clips(plan: Plan, own: Mapping[str, Any]) -> bool:
    """A script's module may clip by itself, by the algorithm that it finds here."""
    return "task" not in own or plan.clip_value is not None


DEPENDENTS = (
    *among_workers("compression", "backend", "sync_batchnorm"),  # and others which a script gives whatever the number
    Dependent("gradient_clip_algorithm", {"gradient_clip_val": 1.0}, _clips),
    Dependent("limit_train_batches", {"overfit_batches": 0.0}, lambda plan, own: not own["overfit_batches"]),
    Dependent("limit_val_batches", {"overfit_batches": 0.0}, lambda plan, own: not own["overfit_batches"]),
    Dependent("val_check_interval", {"limit_val_batches": 1.0}, _validates),
    Dependent("check_val_every_n_epoch", {"limit_val_batches": 1.0}, _validates),
    Dependent("num_sanity_val_steps", {"limit_val_batches": 1.0}, _checks),
    Dependent("inference_mode", {"limit_val_batches": 1.0}, _evaluates),
    Dependent("limit_test_batches", {"task": "test"}, _read_in("test"), trains=False),
    Dependent("limit_predict_batches", {"task": "predict"}, _read_in("predict"), trains=False),
    Dependent(
        "benchmark", {"accelerator": "cuda"}, lambda plan, own: plan.accelerator == "cuda" or not own["benchmark"]
    ),
    Dependent("start_timeout", {"num_nodes": 2}, _several_nodes, trains=False),
    Dependent("master_port", {"num_nodes": 2}, lambda plan, own: "task" not in own or plan.num_nodes > 1, trains=False),
)
