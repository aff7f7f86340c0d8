"""What may differ: the differences that docs/coming-from-lightning.md declares, as patterns of facts' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OWN = "Boom"


def comparable(theirs: dict[str, Any], ours: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts of both, without those of a call that both refused.

    What is refused here is a kind of all that Lightning's error is a kind of, and sentences are each library's own.
    """
    if "note.made.raised" in ours and any(name.endswith(".raised") for name in theirs):
        return {}, {}  # what is refused before anything was called
    theirs, ours = dict(theirs), dict(ours)
    for name in theirs:
        if name.endswith(".refused") and name in ours:
            theirs[name], ours[name] = _refusals(theirs[name], ours[name]), _refusals(ours[name], theirs[name])
    errors = [n for n in {*theirs, *ours} if n.endswith(".error")]
    raised = [n for n in theirs if n.endswith(".raised") and n in ours]
    for name in raised:
        if theirs[name] == [_OWN] == ours[name]:
            continue
        if _fits(theirs[name], ours[name]):
            kept = [n for n in {*theirs, *ours} if _of_earlier_calls(n, name)]
            return {n: theirs[n] for n in kept if n in theirs}, {n: ours[n] for n in kept if n in ours}
    for facts in (theirs, ours):
        for name in errors:
            if name.replace(".error", ".raised") in raised:
                facts.pop(name, None)
    return theirs, ours


def _fits(theirs: list[str], ours: list[str]) -> bool:
    return _OWN not in theirs and _OWN not in ours and ({*theirs} <= {*ours} or "MisconfigurationException" in ours)


def _refusals(mine: list[Any], others: list[Any]) -> list[Any]:
    """What was refused, with the kinds of errors only where they do not fit."""
    lines = []
    for number, (*where, kinds) in enumerate(mine):
        other = others[number][-1] if number < len(others) else []
        lines.append(where if _fits(kinds, other) or _fits(other, kinds) else [*where, kinds])
    return lines


def _of_earlier_calls(fact: str, raised: str) -> bool:
    number = raised.split(".")[1]
    if not number.isdigit():
        return False
    if fact.startswith("note."):
        place = fact.split(".")[1]
        return place.isdigit() and int(place) < int(number)
    return False


def outside(spec: Mapping[str, Any]) -> str | None:
    """Why ``spec`` is no project to compare: what it combines is one of the declared differences, by its name."""
    trainer, step, optim = (spec.get(part, {}) for part in ("trainer", "step", "optim"))
    callbacks = {
        kind: [c.get("options", {}) for c in spec.get("callbacks", ()) if c.get("kind") == kind] for kind in _KINDS
    }
    intervals = {"val_check_interval", "check_val_every_n_epoch"} & {*trainer}
    validates = spec.get("val") is not None and trainer.get("limit_val_batches") not in (0, 0.0)
    if trainer.get("check_val_every_n_epoch", 1) is None and not isinstance(trainer.get("val_check_interval"), int):
        return "refused where the Trainer is made"
    if intervals and not validates:
        return "intervals of validation without validation"
    monitors = callbacks["LearningRateMonitor"]
    if monitors and not spec.get("loggers", ["csv"]):
        return "LearningRateMonitor without a logger"
    if any("log_weight_decay" in m for m in monitors) and optim.get("kind", "rprop") in ("lbfgs", "rprop"):
        return "the weight decay of what has none"
    if step.get("manual") and "gradient_clip_val" in trainer:
        return "clipping under manual optimisation"
    if any(
        log.get("options", {}).get("on_step") is False and not log["options"].get("on_epoch") for log in _logs(spec)
    ):
        return "on_step=False alone"
    if optim.get("kind") == "lbfgs" and ("none_every" in step or trainer.get("precision") == "16-mixed"):
        return "a loss that LBFGS cannot read"
    repeats = optim.get("kind") == "lbfgs" or (step.get("manual") and optim.get("count", 1) > 1)
    if repeats and any(log["hook"] in _REPEATED[bool(step.get("manual")) :] for log in _logs(spec)):
        return "what is logged several times in the first batch"
    if step.get("manual") and step.get("every", 1) > 1 and validates:
        return "gradients that are accumulated by hand over a validation"
    skips = any(act.get("do") == "skip" for act in spec.get("acts", ()))
    if skips and any(s.get("options", {}).get("interval") == "step" for s in optim.get("schedulers", ())):
        return "schedules that step with a batch that was skipped"
    saves_last = any("save_last" in options for options in callbacks["ModelCheckpoint"])
    if trainer.get("fast_dev_run") and saves_last:
        return "save_last's file of a fast_dev_run"
    if any(call.get("ckpt") == "last" for call in spec.get("calls", ())) and not saves_last:
        return "the last checkpoint where none is called so"
    predict = spec.get("predict") or {}
    if predict.get("mode", "sequential") != "sequential":
        return "prediction over loaders that are read at once"
    return None


_REPEATED = (
    *("training_step", "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
)
_KINDS = ("ModelCheckpoint", "EarlyStopping", "LearningRateMonitor")


def _logs(spec: Mapping[str, Any]) -> list[Any]:
    return [log for log in spec.get("logs", ()) if "hook" in log and "name" in log]


def allowed(spec: Mapping[str, Any]) -> list[str]:
    patterns = ["*.validate.num_sanity_val_batches", "*.test.num_sanity_val_batches"]  # they are a fit's
    trainer = spec.get("trainer", {})
    if trainer.get("accumulate_grad_batches", 1) > 1:
        patterns += ["*.losses", "*.optimizer_states"]
    if "link" in str(spec.get("callbacks")):  # here it is what the link means
        patterns += ["note.*.ckpt_path"]
    return patterns
