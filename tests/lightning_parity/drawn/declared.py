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


def outside(spec: Mapping[str, Any], ranks: int = 1) -> str | None:
    """Why ``spec`` is no project to compare on so many ranks: what it combines is one of the declared differences, by
    its name."""
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
    if _resumes(spec) and _ends_within_an_epoch(spec):
        return "resumed within an epoch"
    skips = any(act.get("do") == "skip" for act in spec.get("acts", ()))
    if skips and any(s.get("options", {}).get("interval") == "step" for s in optim.get("schedulers", ())):
        return "schedules that step with a batch that was skipped"
    saves_last = any("save_last" in options for options in callbacks["ModelCheckpoint"])
    if trainer.get("fast_dev_run") and saves_last:
        return "save_last's file of a fast_dev_run"
    if any(call.get("ckpt") == "last" for call in spec.get("calls", ())) and not saves_last:
        return "the last checkpoint where none is called so"
    resets = any(options.get("use_lottery_ticket_hypothesis", True) for options in callbacks["ModelPruning"])
    if resets and (
        trainer.get("max_epochs") != 1 or any(act.get("do") == "max_epochs" for act in spec.get("acts", ()))
    ):
        return "a lottery ticket that is drawn twice"
    averages = callbacks["WeightAveraging"] or callbacks["EMAWeightAveraging"]
    if averages and "64" in str(trainer.get("precision")):
        return "the number format of averaged weights"
    later = [call for call in spec.get("calls", ()) if call.get("do") in ("validate", "test", "predict")]
    if averages and any("ckpt" in call or "no_module" in call for call in later):
        return "a test of averaged weights after a fit with them"
    if callbacks["StochasticWeightAveraging"] and spec.get("net") == "norm":
        return "the pass that renews BatchNorm's statistics"
    surely = max(1, trainer.get("max_epochs", 1))
    if any(
        isinstance(start := options.get("swa_epoch_start"), int) and start > surely
        for options in callbacks["StochasticWeightAveraging"]
    ):
        return "an average of no epoch"
    fits = sum(call.get("do") == "fit" for call in spec.get("calls", ()))
    if callbacks["StochasticWeightAveraging"] and fits > 1:
        return "an average of weights in a further fit"
    if fits > 1 and callbacks["GradientAccumulationScheduler"]:
        return "a further fit where the length of windows was scheduled"
    if fits > 1 and any(c.get("kind") == "OnExceptionCheckpoint" for c in spec.get("callbacks", ())):
        return "a run resumed where it had come to its limit"
    saves = any(act.get("do") == "save" for act in spec.get("acts", ()))
    if saves and [call.get("do") for call in spec.get("calls", [{"do": "fit"}])][:1] != ["fit"]:
        return "a checkpoint of a Trainer that has not trained"
    if _resumes(spec) and any(act.get("do") == "look" for act in spec.get("acts", ())):
        return "what is known in a resumed run"
    if fits > 1 and _changes_order(_logs(spec)):
        return "the order of what is logged under one name, kept from an earlier fit"
    if spec.get("net") == "norm" and optim.get("kind", "rprop" if accumulates(spec) else "sgd") == "rprop":
        return "steps by the sign of gradients that are nothing but rounding"
    names = [s.get("options", {}).get("name") for s in optim.get("schedulers", ())]
    if monitors and len({*names}) < len(names) and any(names):
        return "schedulers of one name"
    if _says_otherwise(_logs(spec)):
        return "options that mean nothing here, once given and once not"
    if ranks > 1 and "none_every" in step:
        return "no loss on some ranks"
    if ranks > 1 and optim.get("kind") == "lbfgs":
        return "what LBFGS reads on several ranks"
    if ranks > 1 and callbacks["BackboneFinetuning"]:
        return "gradients of what was thawed later"
    if ranks == 1 and trainer.get("inference_mode", True) and _evaluates_first(spec):
        return "metric objects in a fit after an evaluation"
    by_step = [s["options"] for s in optim.get("schedulers", ()) if s.get("options", {}).get("interval") == "step"]
    if accumulates(spec) and any(options.get("frequency", 1) > 1 for options in by_step):
        return "the frequency of schedules where windows are of several batches"
    if averages and "configure_model" in spec.get("hooks", ()):
        return "configure_model, called again for averaged weights"
    stages = [next((s for s in ("validation", "test") if s in log["hook"]), "train") for log in _logs(spec)]
    shown = {
        (stage, log["name"], log.get("options", {}).get("logger", True))
        for stage, log in zip(stages, _logs(spec), strict=True)
    }
    if any((stage, name, not flag) in shown for stage, name, flag in shown):
        return "one name that is meant for loggers in one hook only"
    predict = spec.get("predict") or {}
    if predict.get("mode", "sequential") != "sequential":
        return "prediction over loaders that are read at once"
    return None


def accumulates(spec: Mapping[str, Any]) -> bool:
    """Whether steps may be of several batches, so that an epoch may end with a short window."""
    scheduled = any(c.get("kind") == "GradientAccumulationScheduler" for c in spec.get("callbacks", ()))
    return scheduled or spec.get("trainer", {}).get("accumulate_grad_batches", 1) > 1


def _resumes(spec: Mapping[str, Any]) -> bool:
    return any(call.get("do") == "fit" and "ckpt" in call for call in spec.get("calls", ()))


def _ends_within_an_epoch(spec: Mapping[str, Any]) -> bool:
    """Whether a checkpoint of a fit may be of a moment, or with random states, that a resumed one takes differently."""
    kinds = {callback.get("kind") for callback in spec.get("callbacks", ())}
    acts = {act.get("do") for act in spec.get("acts", ())}
    trainer = spec.get("trainer", {})
    return bool(
        acts - {"look", None}
        or kinds & {"EarlyStopping", "BackboneFinetuning", "StochasticWeightAveraging", "WeightAveraging"}
        or {"max_steps", "fast_dev_run", "reload_dataloaders_every_n_epochs"} & {*trainer}
        or spec.get("net") == "dropout"
        or "shuffle" in repr(spec.get("train"))
    )


_REPEATED = (
    *("training_step", "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
)
_KINDS = (
    *("ModelCheckpoint", "EarlyStopping", "LearningRateMonitor", "ModelPruning", "WeightAveraging"),
    *("EMAWeightAveraging", "StochasticWeightAveraging", "GradientAccumulationScheduler"),
    "BackboneFinetuning",
)


def _changes_order(logs: list[Any]) -> bool:
    """Whether one name is logged in several hooks, of which one does not always."""
    where: dict[str, set[str]] = {}
    for log in logs:
        where.setdefault(log["name"], set()).add(log["hook"])
    return any("every" in log and len(where[log["name"]]) > 1 for log in logs)


def _says_otherwise(logs: list[Any]) -> bool:
    """Whether one name is logged in one hook with different options of those that Lightning compares and nothing here
    reads."""
    said: dict[tuple[str, str], set[str]] = {}
    for log in logs:
        options = log.get("options", {})
        unread = [options.get(name, False) for name in ("enable_graph", "attribute")]
        said.setdefault((log["hook"], log["name"]), set()).add(repr([*unread, options.get("add_dataloader_idx", True)]))
    return any(len(options) > 1 for options in said.values())


def _logs(spec: Mapping[str, Any]) -> list[Any]:
    return [log for log in spec.get("logs", ()) if "hook" in log and "name" in log]


def allowed(spec: Mapping[str, Any]) -> list[str]:
    patterns = ["*.validate.num_sanity_val_batches", "*.test.num_sanity_val_batches"]  # they are a fit's
    if accumulates(spec):
        patterns += ["*.losses", "*.optimizer_states"]
    if _resumes(spec):  # counters and metrics are there sooner, and stay
        patterns += ["*.counted.on_fit_start", "*_metrics.*", "*.counted.setup"]
    if "link" in str(spec.get("callbacks")):  # here it is what the link means
        patterns += ["note.*.ckpt_path"]
    return patterns


def _evaluates_first(spec: Mapping[str, Any]) -> bool:
    """Whether metric objects are evaluated before a fit, in whose inference mode Lightning resets them."""
    done = [call.get("do") for call in spec.get("calls", ())]
    evaluated = [stage for stage in ("validate", "test") if stage in done and "fit" in done[done.index(stage) :]]
    hooks = {log["hook"] for log in _logs(spec) if str(log.get("value", "")).startswith("metric_")}
    return any(stage[:4] in hook for stage in evaluated for hook in hooks)


def allowed_on_ranks(spec: Mapping[str, Any]) -> list[str]:
    # What is predicted comes back whole and in the data's order, on every rank.
    return ["*.predict.result", "note.*.Writer.written"]
