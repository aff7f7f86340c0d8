"""Command lines that are drawn: recipes, strategies, options, folders; one in four is broken in some way.

``python -m tests.app.drawn FIRST COUNT`` runs those of the seeds from FIRST on and prints what is amiss, with words. A
command may end in order, with the loss curve of ``strategy=single`` where its strategy is exact, or be refused in a
sentence; the tests run a few. Each runs in a fork of this process, so that torch is imported once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.patience import LIMIT

RECIPES = {
    "mnist": "recipe=mnist model.dropout=0 data.batch_size=8 data.eval_batch_size=8",
    "char_lm": "recipe=char_lm model.layers=4 model.heads=4 model.width=16 model.context=8 data.context=8"
    " data.bytes=20000 data.batch_size=8 callbacks.sample=null",
}
# Short, whatever else is drawn: a run is bounded by epochs and by steps.
SHORT = "trainer.max_epochs=1 trainer.limit_train_batches=6 trainer.limit_val_batches=1 trainer.limit_test_batches=1"

STRATEGIES: dict[str, tuple[str, ...]] = {
    "single": ("",),
    "ddp": ("", "strategy.bucket_cap_mb=0.01", "strategy.topology=tree", "strategy.static_graph=true"),
    "ring": ("", "strategy.gradient_as_bucket_view=false"),
    "tree": ("",),
    "halving_doubling": ("",),
    "hierarchical": ("",),
    "local_sgd": ("strategy.period=2", "strategy.outer=nesterov strategy.outer_lr=0.5", "strategy.outer_lr=0.5"),
    "elastic_averaging": ("strategy.period=2", "strategy.mix=gradients strategy.local=0.25"),
    "gossip": ("", "strategy.graph=full", "strategy.graph=edges strategy.edges=[[0,1],[1,2]]"),
    "decentralized": ("strategy.graph=exponential",),
    "federated": ("strategy.clients=3", "strategy.clients=4 strategy.fraction=0.5 strategy.local_steps=1"),
    "fsdp": ("", "strategy.reshard_after_forward=false", "strategy.narrow_gather=true"),
    "tensor_parallel": ("",),
    "mesh": ("", "strategy.shard=2 strategy.data=1", "strategy.pipeline=2"),
    "pipeline": ("", "strategy.schedule=1f1b", "strategy.schedule=interleaved_1f1b", "strategy.microbatches=1"),
    "parameter_server": ("", "strategy.mode=async", "strategy.embedded=true", "strategy.servers=2"),
}
WORDS: dict[str, tuple[float, tuple[str, ...]]] = {
    "precision": (0.5, ("precision=64-true", "precision=bf16-mixed", "precision=16-mixed", "precision=bf16-true")),
    "compression": (0.2, ("compression=topk", "compression=powersgd compression.rank=1", "compression=int8")),
    "clip": (
        0.3,
        ("trainer.gradient_clip_val=0.1", "trainer.gradient_clip_val=0.01 trainer.gradient_clip_algorithm=value"),
    ),
    "windows": (0.25, ("trainer.accumulate_grad_batches=2", "trainer.accumulate_grad_batches=3")),
    "optimizer": (0.4, ("optimizer=sgd", "optimizer=adamw", "optimizer=adam optimizer.lr=0.01", "optimizer=lbfgs")),
    "scheduler": (0.2, ("scheduler=step", "scheduler=cosine")),
    "logger": (0.7, ("logger=none", "logger=csv", "logger=all")),
    "callbacks": (0.6, ("callbacks=none", "callbacks=profile", "+callbacks.timer={}", "callbacks=[default,timer]")),
    "checkpoint": (0.3, ("checkpoint=none", "checkpoint.every_n_train_steps=2", "checkpoint.save_top_k=-1")),
    "task": (0.15, ("task=fit", "task=test", "task=validate", "task=predict")),
    "batch": (0.05, ("trainer.batch=per_process",)),
    "folder": (0.2, ("'hydra.run.dir=a b'", "hydra.run.dir=ä/√", "hydra.run.dir=./x/../y", "hydra.run.dir=r_${seed}")),
    "rarely": (
        0.15,
        ("trainer.fast_dev_run=true", "trainer.barebones=true", "trainer.val_check_interval=2", "seed=4294967295",
         "trainer.detect_anomaly=true", "trainer.overfit_batches=2", "trainer.deterministic=true", "data.num_workers=1",
         "devices=auto", "trainer.max_time='00:00:10:00'", "launcher.max_restarts=1", "trainer.nonfinite=warn"),
    ),
}  # fmt: skip
SEEN = (
    "--cfg job",
    "--info",
    "--cfg hydra",
    "--cfg all --resolve",
    "--help",
    "--info defaults",
    "--hydra-help",
    "-sc install=bash",
)
SWEEPS = ("seed=1,2", "trainer.accumulate_grad_batches=1,2", "strategy=single,ddp", "trainer.gradient_clip_val=0.1,-1",
          "seed=1,choice(2,3)", "seed=range(1,3)", "strategy=ddp,nothing", "precision=64-true,32-true")  # fmt: skip
VALUES = ("", "null", "-1", "0", "1.5", "1e400", "99999999999999999999", "nan", "-inf", "true", "abc", "'a b'", "[]",
          "[1,2]", "{}", "{a:1}", "ü", "${nothing}", "${oc.env:HOME}", "${seed}", "???", "0x10", "1_000", "'1'", "\\",
          "[", "1e-300", "-0.0")  # fmt: skip
KEYS_OF = {
    "strategy": "name period topology bucket_cap_mb edges graph outer servers clients fraction data wrap microbatches"
    " mode network",
    "compression": "name ratio rank warmup_steps",
    "precision": "name loss_scale",
    "trainer": "max_steps min_steps max_epochs min_epochs max_time limit_train_batches limit_val_batches"
    " overfit_batches fast_dev_run batch val_check_interval check_val_every_n_epoch num_sanity_val_steps"
    " log_every_n_steps accumulate_grad_batches gradient_clip_val gradient_clip_algorithm deterministic"
    " benchmark inference_mode barebones nonfinite",
    "optimizer": "lr betas weight_decay _target_",
    "scheduler": "T_max step_size",
    "checkpoint": "name monitor mode save_top_k save_last dir every_n_epochs every_n_train_steps",
    "launcher": "start_timeout max_restarts",
    "model": "_target_ dropout heads layers tied warmup_steps",
    "data": "_target_ dir batch_size num_workers eval_batch_size bytes context",
    "callbacks": "progress_bar model_summary learning_rate_monitor throughput_monitor early_stopping timer",
    "logger": "csv tensorboard nothing",
    "hydra": "run.dir sweep.dir sweep.subdir job.name verbose output_subdir",
    "nothing": "at.all",
}
OTHERS = (
    "devices num_nodes node_rank accelerator backend seed objective task resume master_addr master_port recipe"
    " hydra/launcher hydra/sweeper"
)
KEYS = (
    *(f"{group}.{key}" for group, keys in KEYS_OF.items() for key in keys.split(" ")),
    *KEYS_OF,
    *OTHERS.split(" "),
)
# Where as many are begun as are asked for, or as much memory is taken, is no place for very large numbers.
COSTLY = {"devices", "num_nodes", "data.num_workers", "data.batch_size", "model.layers", "strategy.servers"}
FOLDERS = ("", "null", "file/below", "/proc/nothing", "file", "x" * 300, "a\nb", "'~/x'", ".", "'{a}'", "'a=b,c'")


@dataclass(frozen=True)
class Drawn:
    """A command line.

    Attributes:
        kind: ``"plain"``, ``"broken"``, ``"shown"`` (what only prints), ``"swept"`` or ``"resumed"``.
        words: what is typed.
        alone: the words of the run on one process that it must equal; None where nothing is compared.
        tolerance: of that comparison.
    """

    kind: str
    words: list[str]
    alone: list[str] | None = None
    tolerance: float = 1e-10


def draw(seed: int) -> Drawn:
    rng = random.Random(seed)
    recipe = rng.choice(["char_lm", "char_lm", "mnist"])
    strategy = rng.choice([*STRATEGIES])
    own = rng.choice(STRATEGIES[strategy]).split()
    common = [*RECIPES[recipe].split(), *SHORT.split(), f"trainer.max_steps={rng.randrange(3, 7)}"]
    drawn = {name: rng.choice(values) for name, (share, values) in WORDS.items() if rng.random() < share}
    for name, word in drawn.items():
        common += [word.strip("'")] if name == "folder" else word.split()
    if "folder" not in drawn:
        common.append("hydra.run.dir=run")
    words = [f"strategy={strategy}", *own, *common]
    if strategy != "single" or rng.random() < 0.2:
        words.append(f"devices={rng.choice([1, 2, 2, 2, 2, 3, 4])}")
    kind = rng.random()
    if kind < 0.25:
        return Drawn("broken", _broken(rng, words))
    if kind < 0.3:
        return Drawn("shown", [*words, *rng.choice(SEEN).split()])
    if kind < 0.38:
        words = [word for word in words if not word.startswith("hydra.")]
        return Drawn("swept", [*words, rng.choice(["-m", "--multirun"]), rng.choice(SWEEPS), "hydra.sweep.dir=sweep"])
    if kind < 0.48:
        return Drawn("resumed", [*words, f"resume={rng.choice(RESUMES)}"])
    comparable = (
        _is_exact(strategy, own)
        and drawn.get("precision") == "precision=64-true"
        and not {"compression", "batch", "task"} & set(drawn)
    )
    return Drawn(
        "plain", words, ["strategy=single", *common, "devices=1"] if comparable else None, _tolerance(drawn, recipe)
    )


RESUMES = ("KEPT/mnist", "KEPT/char_lm", "KEPT/damaged", "KEPT/half", "KEPT/empty", "nowhere", "auto", "last", "best",
           "KEPT/mnist/checkpoints/last.ckpt", "KEPT/mnist/run.json", "KEPT/char_lm/checkpoints", "''")  # fmt: skip


def _is_exact(strategy: str, options: Sequence[str]) -> bool:
    from drivetrain import registry

    exact = registry.load("strategies", strategy).support.fidelity == "exact"
    return bool(exact and "strategy.mode=async" not in options)


def _tolerance(drawn: dict[str, str], recipe: str) -> float:
    """A line search takes rounding to another step; Adam divides by what may be next to nothing."""
    return 1e-6 if drawn.get("optimizer") == "optimizer=lbfgs" else 1e-10


def _broken(rng: random.Random, words: list[str]) -> list[str]:
    """``words`` with one mistake, or what may be one."""
    words = list(words)
    place = rng.randrange(len(words))
    key, _, value = words[place].partition("=")
    at = rng.randrange(1, max(2, len(key)))
    some = rng.choice(KEYS)
    values = [one for one in VALUES if not (some in COSTLY and one in ("99999999999999999999", "0x10", "1_000"))]
    there = [one for one in VALUES if key not in COSTLY or len(one) < 4]
    mistakes: list[Callable[[], list[str]]] = [
        lambda: [*words[:place], f"{key[:at]}{key[at + 1 :]}={value}", *words[place + 1 :]],
        lambda: [*words[:place], f"{key}={value[:-1]}", *words[place + 1 :]],
        lambda: [*words, f"hydra.run.dir={rng.choice(FOLDERS)}"],
        lambda: [*words, f"{rng.choice(['+', '++', '~'])}{some}={rng.choice(values)}"],
        lambda: [*words, f"~{some}"],
        lambda: [*words, some, rng.choice(["=", "--what", "=3", "a=b=c", "++", "~", "@x=3", "a.b", "--cfg"])],
        *[lambda: [*words, f"{some}={rng.choice(values)}"]] * 5,
        *[lambda: [*words[:place], f"{key}={rng.choice(there)}", *words[place + 1 :]]] * 3,
    ]  # fmt: skip
    return rng.choice(mistakes)()


@dataclass(frozen=True)
class Ended:
    """What became of a command: its exit code (None: it did not end), seconds, what was shown, what still runs."""

    code: int | None
    seconds: float
    shown: str
    errors: str
    running: list[str]


def run(words: list[str], folder: Path) -> Ended:
    """The command in a fork of this process, with ``folder`` as its working folder."""
    out, err = folder.parent / f"{folder.name}.out", folder.parent / f"{folder.name}.err"
    began = time.monotonic()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            os.chdir(folder)
            for descriptor, path in ((1, out), (2, err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            sys.argv = ["train.py"]
            code = _exit_code(words)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    code = None
    while code is None and time.monotonic() - began < LIMIT:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.02)
    seconds = time.monotonic() - began
    deadline = time.monotonic() + 3
    while (running := _of_session(child)) and code is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in running:
        os.kill(int(process.split()[0]), signal.SIGKILL)
    if code is None:
        os.waitpid(child, 0)
    texts = [path.read_text(errors="replace") if path.exists() else "" for path in (out, err)]
    return Ended(code, seconds, texts[0], texts[1], running if code is not None else [])


def _exit_code(words: list[str]) -> int:
    from drivetrain import app

    try:
        return app.run(words)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1


def _of_session(session: int) -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as file:
                head, _, rest = file.read().rpartition(")")
        except OSError:
            continue
        state, _, _, its = rest.split()[:4]
        if int(its) == session and state not in "ZX":
            found.append(head.replace("(", ""))
    return found


NOISE = re.compile(r"Traceback|^\s+File \"|\.py:\d+: \w*Warning|Exception ignored|resource_tracker", re.MULTILINE)


def judged(seed: int, kept: Path) -> str:
    """``"equal"``, ``"ended"``, ``"refused"``, ``"shown"``, ``"swept"``, ``"late"`` (refused with a record of it, as
    what only the module or the data can know) or ``"failed"`` (in a sentence: a loss that is not finite, a metric that
    nobody logs), else what is amiss."""
    drawn = draw(seed)
    words = [word.replace("KEPT", str(kept)) for word in drawn.words]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "here"
        folder.mkdir()
        (folder / "file").touch()
        ended = run(words, folder)
        said = _outcome(ended, folder, words)
        if said == "ended" and drawn.alone is not None:
            (folder / "alone").mkdir()
            alone = run(drawn.alone, folder / "alone")
            if alone.code != 0:
                return f"single: exit {alone.code}: {alone.errors[-500:]}"
            return _compared(_records(folder / "alone")[0], _records(folder)[-1], drawn.tolerance)
        return said


def _records(folder: Path) -> list[dict[str, Any]]:
    found = sorted(folder.rglob("run.json"), key=lambda path: ("alone" not in path.parts, str(path)))
    return [json.loads(path.read_text()) for path in found]


def _compared(single: dict[str, Any], found: dict[str, Any], tolerance: float) -> str:
    one, other = single["loss_curve"], found["loss_curve"]
    if [step for step, _ in one] != [step for step, _ in other]:
        return f"steps {[step for step, _ in other]}, not {[step for step, _ in one]}"
    worst = max((abs(a - b) for (_, a), (_, b) in zip(one, other, strict=True)), default=0.0)
    return "equal" if worst <= tolerance else f"differs by {worst}"


def _outcome(ended: Ended, folder: Path, words: list[str]) -> str:
    if ended.code is None:
        return f"hangs: {ended.shown[-300:]} {ended.errors[-300:]}"
    if ended.running:
        return f"still running: {ended.running}"
    told = ended.shown + ended.errors
    logs = [path.read_text(errors="replace") for path in folder.rglob("rank_*.log")]
    for text in (told, *(logs if ended.code == 0 else ())):  # a worker that fails says in its log where
        noise = NOISE.search(text)
        if noise is None:
            continue
        return f"exit {ended.code}, noise: {text[max(0, noise.start() - 200) : noise.start() + 1500]}"
    left = sorted(path.name for path in folder.iterdir() if path.name != "file")
    if {"-m", "--multirun"} & set(words):
        if ended.code == 2:
            return _refused(ended, left, folder)
        bad = [one for one in _records(folder) if one["status"] != "completed"]
        fine = ended.code in (0, 1) and bool(ended.code) == ("failed:" in ended.errors) >= bool(bad)
        return "swept" if fine else f"sweep: exit {ended.code}: {told[-800:]}"
    if ended.code == 2:
        return _refused(ended, left, folder)
    if ended.code == 1 and re.search(
        r"^error: rank \d failed: (Training|Metric)Error: .*\Z", ended.errors, re.MULTILINE
    ):
        return "failed"
    if ended.code != 0:
        return f"exit {ended.code}: {told[-800:]}"
    if not left:
        return "shown" if ended.shown else f"exit 0 and nothing: {ended.errors}"
    records = _records(folder)
    return "ended" if [one["status"] for one in records] == ["completed"] else f"records {records}"


def _refused(ended: Ended, left: list[str], folder: Path) -> str:
    lines = [line for line in ended.errors.splitlines() if not line.startswith("warning: ")]
    if ended.seconds > 20:
        return f"refused after {ended.seconds:.0f} s: {ended.errors}"
    if not lines or not lines[0].startswith("error: ") or len(lines) > 3:
        return f"refused in other words: {ended.errors[-800:]}"
    if len(lines[0]) < 30:
        return f"refused with little: {ended.errors}"
    if not left:
        return "refused"
    return "late" if [one["status"] for one in _records(folder)] == ["failed"] else f"left {left}: {lines[0]}"


def keep(folder: Path) -> Path:
    """Runs to go on from: of each recipe, and one whose checkpoint is damaged."""
    for recipe, words in RECIPES.items():
        more = ["strategy=single", "logger=none", "callbacks=none", "trainer.max_steps=2", f"hydra.run.dir={recipe}"]
        more += ["checkpoint.every_n_train_steps=1"]
        ended = run([*words.split(), *SHORT.split(), *more], folder)
        if ended.code != 0:
            raise RuntimeError(ended.errors)
    shutil.copytree(folder / "mnist", folder / "damaged", symlinks=True)
    shutil.copytree(folder / "mnist", folder / "half", symlinks=True)
    for path in (folder / "damaged" / "checkpoints").rglob("*.distcp"):
        path.write_bytes(path.read_bytes()[:-100] + b"?" * 100)
    for path in (folder / "half" / "checkpoints").rglob("manifest.json"):
        path.write_text(path.read_text()[:40])
    (folder / "empty").mkdir()
    return folder


def prepare() -> None:
    """Import what every command needs, before the first is forked."""
    import drivetrain.trainer  # noqa: F401
    from drivetrain import app  # noqa: F401
    from drivetrain.cli import worker  # noqa: F401


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.app.drawn", description=__doc__)
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("count", type=int, help="how many seeds")
    parser.add_argument("--show", action="store_true", help="only print what is drawn")
    parser.add_argument("--kind", help="only what is plain, broken, shown, swept or resumed")
    given = parser.parse_args(argv)
    seeds = [seed for seed in range(given.first, given.first + given.count) if given.kind in (None, draw(seed).kind)]
    if given.show:
        for seed in seeds:
            print(seed, *draw(seed).words)
        return 0
    prepare()
    counted: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        kept = keep(Path(place))
        for seed in seeds:
            said = judged(seed, kept)
            known = said in ("equal", "ended", "refused", "shown", "swept", "late", "failed")
            counted[said if known else "amiss"] += 1
            if not known:
                print(f"--- {seed}: {said}\n    {' '.join(draw(seed).words)}", flush=True)
    print(", ".join(f"{number} {said}" for said, number in counted.most_common()))
    return int("amiss" in counted)


if __name__ == "__main__":
    sys.exit(main())
