"""Draws on several ranks: Lightning's ``ddp`` over Gloo and drivetrain's, rank by rank."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch.distributed as dist

import drivetrain.lightning
from drivetrain.metric_entries import BATCH_HOOKS
from tests.distributed import run_ranks
from tests.lightning_parity.comparison import differences
from tests.lightning_parity.drawn.declared import allowed, allowed_on_ranks, comparable, outside
from tests.lightning_parity.drawn.grammar import Draw
from tests.lightning_parity.drawn.project import kinds_of, project
from tests.lightning_parity.laboratory import Laboratory, run
from tests.ports import free_port

Spec = dict[str, Any]
ROUNDING = 1e-5  # of weights, whose gradients ranks add up in another order
SEED = 7
SECONDS = 30.0  # for a draw under both


def drawn_for_ranks(seed: int, ranks: int = 2) -> Spec:
    """The first project from ``seed`` on that can be compared on several ranks."""
    source = random.Random(seed)
    while True:
        spec = Draw(source).project()
        if not outside(spec, ranks):
            _suit(spec, source, ranks)
            if not outside(spec, ranks):
                return spec


def _suit(spec: Spec, source: random.Random, ranks: int) -> None:
    """Change what is declared to differ on several ranks and would leave hardly a draw to compare."""
    for stage in ("train", "val", "test", "predict"):
        for part in _parts(spec.get(stage)):
            part.pop("kind", None)  # a stream, which every rank reads whole
            part["batch"] = min(part["batch"], 3)
            whole = ranks * part["batch"]
            part["n"] = max(part["n"] // whole, 1) * whole
    if spec.get("net") in ("dropout", "norm"):
        spec["net"] = "mlp"
    monitored = {name.removesuffix("_step").removesuffix("_epoch") for name in _monitors(spec)}
    if monitored:  # what a step shows, ranks combine at the next boundary
        spec["trainer"]["log_every_n_steps"] = 1
        spec["trainer"].pop("accumulate_grad_batches", None)
        spec["acts"] = [act for act in spec.get("acts", ()) if act.get("do") != "look"]
    looks = any(act.get("do") == "look" for act in spec.get("acts", ()))
    for log in spec.get("logs", ()):
        options = log.setdefault("options", {})
        by_step = options.get("on_step") or (options.get("on_step") is None and log["hook"] in BATCH_HOOKS)
        options["sync_dist"] = log["name"] in monitored or (not (looks and by_step) and source.random() < 0.7)
        for name in ("rank_zero_only", "batch_size"):
            options.pop(name, None)
    for act in spec.get("acts", ()):
        if act.get("do") == "stop":  # which ranks agree upon after the batch
            spec["trainer"]["log_every_n_steps"] = 1
            if act["hook"] not in BATCH_HOOKS:
                act["hook"] = "on_train_epoch_end"
    for call in spec.get("calls", ()):
        if call.get("new_module"):  # what is drawn after a stage goes on where it was before, here
            call["seed"] = SEED
    spec["trainer"].pop("overfit_batches", None)


def _monitors(spec: Spec) -> list[str]:
    """The names by which callbacks and schedules decide, and by which files are called."""
    options = [part.get("options", {}) for part in [*spec.get("callbacks", ()), *spec.get("brings", ())]]
    options += [part.get("options", {}) for part in spec.get("optim", {}).get("schedulers", ())]
    found = [part["monitor"] for part in options if "monitor" in part]
    return found + [name for name in ("loss", "val") for part in options if name in part.get("filename", "")]


def _parts(stage: Any) -> list[Spec]:
    return [] if stage is None else stage.get("parts", [stage])


def undeclared_on_ranks(spec: Spec, folder: Path, ranks: int = 2) -> dict[str, str]:
    """A line for each fact in which the two runs of ``spec`` differ undeclared on any rank, the first that does."""
    if outside(spec, ranks):
        return {}
    port = free_port()

    def both(rank: int, world_size: int) -> dict[str, str]:
        of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size}
        of_torchrun |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in of_torchrun.items()}, TORCHELASTIC_RUN_ID="drawn")
        facts = []
        for name, library in (("there", lightning.pytorch), ("here", drivetrain.lightning)):
            options: dict[str, Any] = {"strategy": strategy_of(spec), "devices": world_size, "settled": met}
            try:
                facts.append(run(_seeded(project(spec)), library, folder / name, **options))
            except Exception as error:
                facts.append({"note.made.raised": kinds_of(error), "note.made.error": repr(error)})
            if name == "there":  # Lightning takes the group that is there, drivetrain makes its own
                dist.barrier()
                dist.destroy_process_group()
        found = differences(*comparable(*facts))
        # Of files the first rank alone knows when they are whole.
        return found if rank == 0 else {name: line for name, line in found.items() if not name.startswith(_FILES)}

    try:
        lines = run_ranks(both, ranks, timeout=SECONDS)
    finally:
        for name in ("there", "here"):
            shutil.rmtree(folder / name, ignore_errors=True)
    patterns = [*allowed(spec), *allowed_on_ranks(spec)]
    found: dict[str, str] = {}
    for rank, of_rank in enumerate(lines):
        for name, line in of_rank.items():
            if not _rounded(line) and not any(fnmatchcase(name, pattern) for pattern in patterns):
                found.setdefault(name, f"rank {rank}: {line}")
    return found


_FILES = ("file.", "checkpoint.", "table.", "parameters.")


def strategy_of(spec: Spec) -> str:
    """Both libraries' word for what trains ``spec`` on several ranks."""
    by_hand = spec.get("step", {}).get("manual") and spec.get("optim", {}).get("count", 1) > 1
    return "ddp_find_unused_parameters_true" if by_hand else "ddp"


def met() -> None:
    """Wait for the other ranks where there is a group."""
    if dist.is_initialized():  # not where what was drawn was refused before any stage
        dist.barrier()


def _seeded(made: Callable[[Any], Callable[[Laboratory], None]]) -> Callable[[Any], Callable[[Laboratory], None]]:
    """The project with a seed of its own, without which Lightning shuffles by seed 0."""

    def of(L: Any) -> Callable[[Laboratory], None]:
        script = made(L)

        def seeded(laboratory: Laboratory) -> None:
            L.seed_everything(SEED, verbose=False)
            script(laboratory)

        return seeded

    return of


def _rounded(line: str) -> bool:
    found = re.search(r"differ by up to (\S+)$", line)
    return found is not None and float(found.group(1)) < ROUNDING
