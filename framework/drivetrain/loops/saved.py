"""Where training stands, as a checkpoint holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.loops.fit import FitLoop


def state_of(fit: FitLoop) -> dict[str, Any]:
    """The counters of a fit, how far its epoch has come, and the curve of its losses, as plain data."""
    boundary = fit.boundary
    return {
        "epoch": fit.epoch,
        "batch": fit.batch,
        "rounds": fit.strategy.support.rounds,
        "global_step": fit.global_step,
        "data_seed": fit.trainer.data_seed,
        "optimizer_steps": fit.optimization.steps,
        "validated": fit.validations.done,
        "validation": [0, []] if fit.trainer.validation is None else fit.trainer.validation.counters(),
        "read_in": [fit.data.read_in, fit.validations.read_in],
        "ended": fit.ended,
        "logged": boundary.logged,
        "plateau_due": fit.schedules.plateau_due,
        "schedules": [fit.schedules.stepped, fit.schedules.stepped_in_epoch],
        "stop": boundary.stop and boundary.stop_reason is None,  # a time limit may be another next time
        "is_last_batch": fit.is_last_batch,
        "batches_seen": fit.batches_seen,
        "seconds": boundary.agreed_seconds,
        "loss_curve": [list(point) for point in fit.trainer.loss_curve],
    }


def of_none() -> dict[str, Any]:
    """The counters where no fit has begun, as far as a file in Lightning's layout has them."""
    counts = dict.fromkeys(("epoch", "batch", "global_step", "optimizer_steps", "batches_seen"), 0)
    return {**counts, "validated": False, "ended": False, "is_last_batch": False}


def restore(fit: FitLoop, state: dict[str, Any]) -> None:
    """Let ``fit`` go on from what :func:`state_of` said."""
    fit.epoch, fit.batch, fit.global_step = state["epoch"], state["batch"], state["global_step"]
    # Whether it is time to ask for loaders again is counted from where the undisturbed run asked for them last.
    fit.data.read_in, fit.validations.read_in = state.get("read_in", (fit.epoch, fit.epoch))
    fit.optimization.steps = state.get("optimizer_steps", fit.global_step)
    fit.validations.done, fit.ended, fit.boundary.logged = state["validated"], state["ended"], state["logged"]
    if fit.trainer.validation is not None:
        fit.trainer.validation.go_on_from(state.get("validation", [0, []]))
    fit.schedules.plateau_due = state["plateau_due"]
    fit.schedules.stepped, fit.schedules.stepped_in_epoch = state.get("schedules", (0, 0))
    fit.trainer.should_stop = fit.boundary.stop = state["stop"] and fit.trainer.meanings.stays_stopped
    fit.is_last_batch = state["is_last_batch"]
    fit.batches_seen, fit.seconds_before = state["batches_seen"], state["seconds"]
    fit.trainer.loss_curve[:] = [tuple(point) for point in state["loss_curve"]]
    _count_batches_anew(fit, state.get("rounds", False))
    fit.resumed = fit.batch > 0 or fit.ended
    fit.restored = True


def _count_batches_anew(fit: FitLoop, rounds: bool) -> None:
    """A round is one batch to the loop. A strategy of the other kind takes over an epoch whose batches are done as
    done; of one begun it makes the whole round."""
    ours = fit.strategy.support.rounds
    if rounds != ours and fit.batch > 0:
        length = 1 if ours else fit.data.source.length
        if length == float("inf"):  # nothing tells how many there were
            fit.ended = fit.is_last_batch
        if not fit.is_last_batch:
            fit.batch = 0
        else:
            fit.batch = 1 if fit.ended else int(length)
