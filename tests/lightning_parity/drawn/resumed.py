"""Draws that break off and go on in another process's state: they must end with an undisturbed run's bits.

Compared is drivetrain with itself: Lightning's checkpoints know neither the place in the data nor random states.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

import drivetrain.lightning
from tests.distributed import run_job
from tests.lightning_parity.comparison import differences
from tests.lightning_parity.drawn.declared import outside
from tests.lightning_parity.drawn.grammar import Draw
from tests.lightning_parity.drawn.on_ranks import SECONDS, met, strategy_of
from tests.lightning_parity.drawn.project import kinds_of, project
from tests.lightning_parity.laboratory import Laboratory, run

Spec = dict[str, Any]
EACH = {"kind": "ModelCheckpoint", "options": {"dirpath": "each", "every_n_train_steps": 1, "save_top_k": -1}}
_AGAIN = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_sanity_check_start")  # called in a resumed run


def drawn_to_resume(seed: int) -> Spec:
    """The first project from ``seed`` on that trains two steps or more, with the step ``broken_at`` after which it
    breaks off."""
    source = random.Random(seed)
    while True:
        spec = Draw(source).project()
        _suit(spec, source)
        if not outside(spec):
            return spec


def _suit(spec: Spec, source: random.Random) -> None:
    trainer = spec["trainer"]
    # A stop that was asked for before its time is not asked for again, as under Lightning.
    for name in ("min_epochs", "min_steps"):
        trainer.pop(name, None)
    for name in ("fast_dev_run", "overfit_batches", "enable_checkpointing", "detect_anomaly"):
        trainer.pop(name, None)
    if trainer.get("limit_train_batches") in (0, 0.0):
        del trainer["limit_train_batches"]
    trainer["max_epochs"] = max(trainer.get("max_epochs", 1), 2)
    # What is logged and done goes by the step, which a resumed run knows, and not in hooks that it calls anew.
    spec["by_step"] = True
    spec["logs"] = [log for log in spec.get("logs", ()) if log["hook"] not in _AGAIN]
    spec["acts"] = [act for act in spec.get("acts", ()) if act["do"] == "stop" and act["hook"] not in _AGAIN]
    spec["calls"] = [{"do": "fit"}]
    # Where callbacks save after a batch, a hook of the module is still to come that a resumed run does not call.
    spec["logs"] = [
        log for log in spec["logs"] if log["hook"] != "on_train_batch_end" or log.get("owner") == "callback"
    ]
    spec["hooks"] = [hook for hook in spec.get("hooks", ()) if hook not in _AGAIN]
    spec["callbacks"] = [c for c in spec.get("callbacks", ()) if c["kind"] not in ("OnExceptionCheckpoint", "Writer")]
    for number, made in enumerate(spec["callbacks"]):
        if made["kind"] == "ModelCheckpoint":
            made["options"]["dirpath"] = f"folder{number}"
    spec["callbacks"].append(EACH)
    spec["broken_at"] = source.randint(1, 6)


def disturbed(spec: Spec, folder: Path, **options: Any) -> dict[str, str]:
    """A line for each fact in which a run of ``spec`` that breaks off and goes on ends otherwise than one that does not
    break off."""
    if not _is_whole(spec) or outside(spec):
        return {}
    try:
        return _compared(spec, folder, options)
    except Exception as error:
        return {"made.raised": f"{kinds_of(error)} {error!r}"}
    finally:
        for name in ("whole", "torn"):
            shutil.rmtree(folder / name, ignore_errors=True)


def disturbed_on_ranks(spec: Spec, folder: Path, ranks: int = 2) -> dict[str, str]:
    """As :func:`disturbed`, of a run on several ranks: the lines of the first that has one for a fact."""
    if not _is_whole(spec) or outside(spec, ranks):
        return {}
    options = {"strategy": strategy_of(spec), "devices": ranks, "settled": met}

    def compared(rank: int, world_size: int) -> dict[str, str]:
        os.environ["TORCHELASTIC_RUN_ID"] = "drawn"
        return _compared(spec, folder, options)

    try:
        lines = run_job(compared, ranks, timeout=SECONDS)
    finally:
        for name in ("whole", "torn"):
            shutil.rmtree(folder / name, ignore_errors=True)
    found: dict[str, str] = {}
    for rank, of_rank in enumerate(lines):
        for name, line in of_rank.items():
            found.setdefault(name, f"rank {rank}: {line}")
    return found


def _is_whole(spec: Spec) -> bool:
    kept = [c.get("options", {}) for c in spec.get("callbacks", ()) if c.get("kind") == "ModelCheckpoint"]
    return {"broken_at", "by_step"} <= spec.keys() and all("dirpath" in options for options in kept)


def _compared(spec: Spec, folder: Path, options: dict[str, Any]) -> dict[str, str]:
    try:
        whole = run(project(spec), drivetrain.lightning, folder / "whole", **options)
    except Exception:  # refused where it is made: nothing to break off
        return {}
    found = [path for path in folder.joinpath("whole/each").glob("*.ckpt") if "-v" not in path.stem]
    steps = sorted(int(path.stem.rpartition("step=")[2]) for path in found)
    earlier = [step for step in steps if step <= spec["broken_at"]]
    if not earlier or earlier[-1] == steps[-1] or "note.0.raised" in whole:
        return {}
    at = earlier[-1]
    torn = {**spec, "acts": [*spec.get("acts", ()), {"do": "raise", "hook": "on_train_batch_start", "at": at}]}
    first = run(project(torn), drivetrain.lightning, folder / "torn", **options)
    if first.get("note.0.raised") != ["Boom"]:
        return {}
    path = next(p for p in folder.joinpath("torn/each").glob("*.ckpt") if p.stem.endswith(f"step={at}"))
    resumed = {**spec, "calls": [{"do": "fit", "ckpt": str(path)}]}
    again = run(_elsewhere(project(resumed)), drivetrain.lightning, folder / "torn", **options)
    expected, ended = _ends(whole), _ends(again)
    for name in [*expected]:  # what is told batch by batch is the end of what the undisturbed run tells
        if name in ended and isinstance(expected[name], list):
            expected[name] = expected[name][max(len(expected[name]) - len(ended[name]), 0) :]
    lines = differences(expected, ended)
    return {n: line.replace("there", "whole").replace("here", "resumed") for n, line in lines.items()}


def _elsewhere(made: Callable[[Any], Callable[[Laboratory], None]]) -> Callable[[Any], Callable[[Laboratory], None]]:
    """The project in a process with other random states."""

    def of(L: Any) -> Callable[[Laboratory], None]:
        script = made(L)

        def elsewhere(laboratory: Laboratory) -> None:
            torch.manual_seed(99)
            random.seed(99)
            script(laboratory)

        return elsewhere

    return of


_END = (
    *("0.0.fit.weights.*", "0.0.fit.*_metrics.*", "0.0.fit.losses", "0.0.fit.rates", "0.0.fit.global_step"),
    *("0.0.fit.current_epoch", "0.0.fit.should_stop", "note.0.raised", "note.0.error"),
    *("note.0.*.best_model_score", "note.0.*.kth_value", "note.0.*.wait_count"),
    *("note.0.*.stopped_epoch", "note.0.*.best_score", "note.0.*.batches", "note.0.module.seen", "note.0.state.*"),
)


def _ends(facts: dict[str, Any]) -> dict[str, Any]:
    found = {n: value for n, value in facts.items() if any(fnmatchcase(n, pattern) for pattern in _END)}
    tables = {
        n.split("/")[0]: rows for n, rows in sorted(facts.items()) if n.startswith("table.")
    }  # the newest version
    for name, rows in tables.items():  # without learning rates, which are written where an epoch is entered anew
        of_rates = ("lr", "rate")
        kept = [{k: v for k, v in row.items() if not k.startswith(of_rates)} for row in rows]
        found[name] = [row for row in kept if row.keys() - {"step"}]
    if "note.0.module.seen" in found:  # batches that were trained
        found["note.0.module.seen"] = [item for item in found["note.0.module.seen"] if isinstance(item[0], int)]
    return found
