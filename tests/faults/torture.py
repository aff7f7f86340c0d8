"""Runs to which something is done: any strategy, any deed at any moment; each held to what a run promises.

``python -m tests.faults.torture FIRST COUNT`` runs the seeds from FIRST on and prints what was found: that the command
ends within seconds, with its exit code, the failing rank and the cause on top and in ``run.json``; that no process,
segment of shared memory or temporary folder stays; that each checkpoint is complete; and that the same command with
``resume=auto`` ends with the bits of a run to which nothing was done. The tests run a few.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drivetrain import app, checkpoint, record
from drivetrain.checkpoint import layout
from drivetrain.errors import DrivetrainError
from tests.faults import struck
from tests.faults.struck import REFUSED, TO_THE_LAUNCHER, Strike
from tests.resume.runs import differences

PR_SET_CHILD_SUBREAPER = 36
SOON = 5.0  # seconds that a run may take to end
HANGS = 120.0
THAWS = 0.7  # seconds that a worker stands still before it is killed
PLACES: dict[str, list[list[str]]] = {
    "single": [[]],
    "ddp": [[], ["compression=topk"], ["strategy.static_graph=true"]],
    **{name: [[]] for name in ("ring", "tree", "halving_doubling", "hierarchical", "tensor_parallel")},
    "fsdp": [[], ["strategy.reduce_every_micro_batch=false"]],
    "zero": [[f"strategy.stage={stage}"] for stage in range(4)],
    "pipeline": [[], ["strategy.schedule=1f1b"], ["strategy.schedule=interleaved_1f1b"]],
    "mesh": [["strategy.shard=2", "strategy.data=1"], [], ["strategy.pipeline=2", "strategy.data=-1"]],
    "parameter_server": [
        *([], ["strategy.servers=2"], ["strategy.embedded=true"], ["strategy.encrypt=true"], ["strategy.mode=async"]),
        ["strategy.mode=async", "strategy.max_staleness=1"],
        ["strategy.mode=async", "strategy.embedded=true"],
    ],
    "local_sgd": [["strategy.period=3"], ["strategy.period=3", "strategy.outer=nesterov"]],
    "elastic_averaging": [["strategy.period=2"], ["strategy.mix=gradients"]],
    "gossip": [[], ["strategy.graph=full"]],
    "federated": [["strategy.clients=5"], ["strategy.clients=4", "strategy.algorithm=fedprox"]],
}
STOPS = {"term launcher": 143, "int launcher": 130, "term group": 143, "int twice": 130, "term": 143, "int": 130}
OF_EVERY_RUN = (
    *("recipe=none", "callbacks=none", "+callbacks.struck._target_=tests.faults.struck.Struck", "accelerator=cpu"),
    *("trainer.max_epochs=2", "optimizer=none", "seed=3"),
)


@dataclass(frozen=True)
class Drawn:
    """A run as plain data: the words of its command, and what is done to it."""

    words: tuple[str, ...]
    devices: int
    exact: bool
    threaded: bool
    lightning: bool
    rng: random.Random

    def __str__(self) -> str:
        words = [word for word in self.words if word not in OF_EVERY_RUN]
        return " ".join([*words, *["(forkserver)"] * self.threaded, *["(Lightning)"] * self.lightning])

    def strike(self, whole: Path, total: float) -> Strike:
        """What is done to it, once it was seen undisturbed in ``whole``."""
        notes = whole / "notes"
        seen = [json.loads((notes / f"seen_{rank}").read_text()) for rank in range(self.devices)]
        trained = (notes / "seen_0").stat().st_mtime - (notes / "worker_0").stat().st_mtime
        return struck.drawn_strike(self.rng, seen, total, trained)


@dataclass
class Ending:
    """How a command ended.

    Attributes:
        seconds: from what was done to it, or from its start, to the end of its last process.
        struck: whether something was done to it, and to which rank.
    """

    code: int
    seconds: float
    struck: bool
    output: str
    total: float
    left: list[str] = field(default_factory=list)


def draw(seed: int) -> Drawn:
    rng = random.Random(seed)
    name = rng.choice([*PLACES])
    options = rng.choice(PLACES[name])
    devices = 1 if name == "single" else rng.choice([2, 2, 2, 3, 3, 4, 4, 1])
    if name == "mesh" or "interleaved_1f1b" in "".join(options):
        devices = rng.choice([2, 4])
    gpt = name in ("tensor_parallel", "mesh") or rng.random() < 0.4
    precision = "32-true" if name == "zero" else "64-true"
    saves = rng.choice(
        [["checkpoint.every_n_train_steps=2"], ["checkpoint.every_n_train_steps=3", "checkpoint.save_top_k=-1"], []]
    )
    if "every" not in "".join(saves) and rng.random() < 0.5:
        saves = ["checkpoint.monitor=val/loss", "checkpoint.save_top_k=2"]
    words = [
        *OF_EVERY_RUN,
        *(f"strategy={name}", f"devices={devices}", f"precision={precision}", *options, *saves),
        f"+model._target_={'tests.faults.struck.Gpt' if gpt else 'tests.runs.Classifier'}",
        f"+data._target_=tests.faults.struck.{'Tokens' if gpt else 'Points'}",
        f"+data.workers={rng.choice([0, 0, 0, 0, 1])}",
        f"task={rng.choice(['fit', 'fit', 'fit_test'])}",
        f"logger={rng.choice(['none', 'none', 'csv'])}",
        f"trainer.log_every_n_steps={rng.choice([1, 3, 50])}",
        f"trainer.accumulate_grad_batches={rng.choice([1, 1, 1, 2])}",
    ]
    if name != "federated" and rng.random() < 0.3:
        words.append("trainer.val_check_interval=0.5")
    exact = "strategy.mode=async" not in words
    return Drawn(tuple(words), devices, exact, rng.random() < 0.15, rng.random() < 0.25, rng)


# -- running a command ------------------------------------------------------------------------------------------
def command(drawn: Drawn, place: Path, strike: Strike | None, *more: str) -> Ending:
    """Run the command in a fork of this process and wait for the last of its processes."""
    notes, temporary, output = place / "notes", place / "tmp", place / "output"
    shutil.rmtree(notes, ignore_errors=True)
    notes.mkdir()
    temporary.mkdir(exist_ok=True)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent becomes a child of this process
    segments = set(os.listdir("/dev/shm"))
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _child(drawn, (*drawn.words, *more), place, strike, output)
    code, killed = _watch(pid, notes, strike, began)
    ended = time.monotonic()
    note = (notes / "struck").read_text().split() if (notes / "struck").exists() else []
    ending = Ending(
        code,
        ended - max(float(note[0]) if note else began, killed),
        bool(note),
        output.read_text(errors="replace"),
        ended - began,
    )
    ending.left += [f"/dev/shm/{name}" for name in _left_segments(set(os.listdir("/dev/shm")) - segments)]
    if strike is None or strike.deed != "kill launcher":  # the next start removes what it had
        ending.left += [str(path.relative_to(place)) for path in temporary.iterdir()]
    return ending


def _child(drawn: Drawn, words: tuple[str, ...], place: Path, strike: Strike | None, output: Path) -> None:
    code = 70
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  as a command finds them, not as pytest does
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ["TMPDIR"] = tempfile.tempdir = str(place / "tmp")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ[struck.WHERE] = str(place / "notes")
        (place / "notes" / "launcher").write_text(str(os.getpid()))
        if strike is not None:
            os.environ[struck.WHAT] = json.dumps(asdict(strike))
        if drawn.threaded:  # then workers come from a forkserver
            threading.Thread(target=time.sleep, args=[HANGS], daemon=True).start()
        if drawn.lightning:
            values = dict(word.split("=", 1) for word in words)
            code = struck.as_lightning(values, place / "run", values.get("resume") == "auto")
        else:
            code = app.run([*words, f"hydra.run.dir={place / 'run'}"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _watch(pid: int, notes: Path, strike: Strike | None, began: float) -> tuple[int, float]:
    """The launcher's exit code as a shell's, once no process of its is left; and when a frozen worker was killed."""
    code, killed, told = None, 0.0, strike is None or strike.moment != "outside"
    hanging = 0.0
    while True:
        try:
            done, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            assert code is not None
            return code, killed
        if done == pid:
            code = os.waitstatus_to_exitcode(status)
            continue
        if done:
            continue
        now = time.monotonic()
        if not told and strike is not None and now - began > strike.seconds:
            told = True
            _from_outside(pid, strike, notes)
        if strike is not None and strike.deed == "freeze" and not killed and (notes / "struck").exists():
            when, victim = (notes / "struck").read_text().split()[:2]
            if now - float(when) > THAWS:
                killed = now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(victim), signal.SIGKILL)
        if now - began > HANGS + 4 * (hanging > 0):
            for one in [pid, *_below(os.getpid())]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGABRT if not hanging else signal.SIGKILL)
            hanging = hanging or now
        time.sleep(0.01)


def _from_outside(pid: int, strike: Strike, notes: Path) -> None:
    workers = _workers(pid)
    if strike.deed in TO_THE_LAUNCHER:
        targets, signum = [pid], TO_THE_LAUNCHER[strike.deed]
    elif workers:
        targets = workers if strike.deed == "kill all" else [workers[strike.rank % len(workers)]]
        signum = signal.SIGTERM if strike.deed == "term" else signal.SIGKILL
    else:
        return
    (notes / "struck").write_text(f"{time.monotonic()} {targets[0]} {strike.deed}")
    for target in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, signum)


def _workers(pid: int) -> list[int]:
    """Of a launcher, or of its forkserver."""
    found = _children(pid)
    servers = [one for one in found if b"multiprocessing.forkserver" in _words_of(one)]
    trackers = [one for one in found if b"resource_tracker" in _words_of(one)]
    return [one for server in servers for one in _children(server)] or [one for one in found if one not in trackers]


def _words_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _below(pid: int) -> list[int]:
    return [deep for one in _children(pid) for deep in (one, *_below(one))]


def _left_segments(names: set[str]) -> list[str]:
    """Those that no process maps: others at work on this machine have segments of their own. By their numbers, for a
    semaphore is mapped before it gets its name."""
    time.sleep(0.3 if names else 0.0)
    numbers = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            numbers[name] = str(os.stat(f"/dev/shm/{name}").st_ino)
    held: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps") if numbers else ():
        with contextlib.suppress(OSError):
            held |= {line.split()[4] for line in maps.read_text().splitlines() if "/dev/shm" in line}
    return [name for name, number in numbers.items() if number not in held and os.path.exists(f"/dev/shm/{name}")]


# -- judging it -------------------------------------------------------------------------------------------------
def faults_of(drawn: Drawn, strike: Strike, ending: Ending, run: Path, soon: float) -> list[str]:
    """What the struck command did not keep."""
    found = [f"left behind: {one}" for one in ending.left]
    deed = strike.deed
    if ending.seconds > soon:
        found.append(f"took {ending.seconds:.1f} s to end")
    known = record.left_in(run) if run.exists() else {}
    first = next((line for line in ending.output.splitlines() if line.startswith("error: ")), "")
    if deed == "kill launcher":
        over = strike.moment == "outside" and ending.code == 0  # it had just ended
        if ending.code != -signal.SIGKILL and not over:
            found.append(f"exit code {ending.code}")
    elif ending.code < 0 and strike.moment == "outside" and not known and deed in STOPS:
        pass  # before the command had come to itself
    elif ending.code == 0:
        if not drawn.lightning and known.get("status") not in ("completed", "stopped"):
            found.append(f"exit code 0 and status {known.get('status')}")
        told = deed in REFUSED and re.search("an old checkpoint stays|was not kept", ending.output)  # by a warning
        if deed not in STOPS and not told:
            found.append("exit code 0")
    else:
        stopped = _code_of(deed, drawn.lightning)
        if stopped is not None and ending.code != stopped:
            found.append(f"exit code {ending.code}, not {stopped}")
        if stopped is None and not 0 < ending.code < 256:
            found.append(f"exit code {ending.code}")
        status = "failed" if stopped is None else "interrupted"
        if known and known["status"] != status:
            found.append(f"status {known['status']}, not {status}")
        if not known and strike.moment != "outside" and not drawn.lightning:
            found.append("no run.json")
        if known and not known["error"]:
            found.append("no error in run.json")
        if stopped is None:
            found += _told(strike, first)
            if known and known["error"] and not first.removeprefix("error: ").startswith(known["error"][:60]):
                found.append(f"run.json says {known['error']!r}, the terminal {first!r}")
        if "Traceback" in ending.output and deed not in ("raise", *REFUSED):
            found.append("a traceback is shown")
    found += _checkpoints(run)
    return found


def _code_of(deed: str, lightning: bool) -> int | None:
    """With which a run that was stopped in order ends: Lightning's Trainer exits with 1 after Ctrl-C."""
    code = STOPS.get(deed)
    return 1 if lightning and code == 128 + signal.SIGINT else code


def _told(strike: Strike, first: str) -> list[str]:
    which = r"\d" if strike.deed == "kill all" or strike.moment == "outside" else str(strike.rank)
    expected = {
        "leave 0": rf"rank {which} failed: exited with code 0 before its work was done",
        "leave 3": rf"rank {which} failed: exited with code 3",
        "raise": rf"rank {which} failed: RuntimeError: struck",
    }.get(strike.deed, rf"rank {which} failed: killed by SIGKILL")
    if strike.deed in REFUSED:
        expected = rf"(rank \d failed: )?.*{re.escape(os.strerror(REFUSED[strike.deed]))}"
    return [] if re.match(f"error: {expected}", first) else [f"said {first!r}"]


def _checkpoints(run: Path) -> list[str]:
    found = []
    for path in sorted((run / "checkpoints").glob("*")) if run.exists() else []:
        if path.name.startswith("."):
            continue
        try:
            checkpoint.resolve(path, path.parent)
        except (DrivetrainError, OSError) as error:
            found.append(f"{path.name}: {error}")
    return found


def state(run: Path, devices: int) -> dict[str, Any]:
    """All that a completed run says and keeps of what it trained."""
    held: dict[str, Any] = {}
    if (run / struck.END).is_file():  # in Lightning's layout
        held = checkpoint.single.read(run / struck.END)
        held["own"] = [layout.unpack(one) for one in held["drivetrain"].pop("own")]
        del held["drivetrain"]["metrics"]  # one that goes on from its end has none, as Lightning's
        return {name: value for name, value in held.items() if name != "callbacks"}
    known = record.read(run)
    for key in ("status", "epochs", "global_step", "metrics", "loss_curve", "weights_digest"):
        held[key] = known[key]
    for rank in range(devices):
        loaded = checkpoint.load(run / struck.END, rank=rank, world_size=devices)
        held[f"own {rank}"] = loaded.own
        held["shared"] = {key: value for key, value in loaded.shared.items() if key != "callbacks"}
    return held


def judged(seed: int, place: Path, shown: bool = False, soon: float = SOON) -> list[str]:
    """What was found, with ``refused``, ``missed`` (nothing was done to it) or ``kept`` where all is well."""
    drawn = draw(seed)
    whole, hit = place / "whole", place / "hit"
    whole.mkdir()
    hit.mkdir()
    reference = command(drawn, whole, None)
    if reference.code == 2:
        return ["refused", reference.output[-300:]]
    if reference.code or reference.left:
        return [f"undisturbed it ended with {reference.code}, left {reference.left}: {reference.output[-2000:]}"]
    strike = drawn.strike(whole, reference.total)
    ending = command(drawn, hit, strike)
    if shown:
        print(
            f"  {strike}: {ending.code} after {ending.seconds:.2f} s, struck: {ending.struck}",
            ending.output[:3000],
            sep="\n",
        )
    found = faults_of(drawn, strike, ending, hit / "run", soon) if ending.struck else []
    if not ending.struck and ending.code:
        found.append(f"nothing was done to it and it ended with {ending.code}")
    if found and not shown:
        found.append(f"{strike} it said: {ending.output[:600]!r}")
    (hit / "output").rename(hit / "output_1")
    if ending.code:
        resumed = command(drawn, hit, None, "resume=auto")
        if resumed.code or resumed.left:
            return [*found, f"resumed it ended with {resumed.code}, left {resumed.left}: {resumed.output[-2000:]}"]
        if hidden := [path.name for path in (hit / "run" / "checkpoints").glob(".*")]:
            found.append(f"after resuming there is still {hidden}")
    if drawn.exact:
        of_both = [state(folder / "run", drawn.devices) for folder in (whole, hit)]
        # The pushes of a parameter server's worker are counted from where its server began.
        found += [line for line in differences(*of_both, "resumed") if ".strategy.clock:" not in line][:3]
    if ending.struck:
        _slow.append((round(ending.seconds, 2), seed, strike.deed))
    return found or ["kept" if ending.struck else "missed"]


_slow: list[tuple[float, int, str]] = []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.torture", description=__doc__)
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("count", type=int, help="how many seeds")
    parser.add_argument("--show", action="store_true", help="what the struck command said")
    parser.add_argument("--keep", type=Path, help="folder in which the runs of seeds with faults stay")
    given = parser.parse_args()
    _import_all()
    counted: Counter[str] = Counter()
    for seed in range(given.first, given.first + given.count):
        place = Path(tempfile.mkdtemp(prefix="torture-"))
        try:
            said = judged(seed, place, given.show)
            known = said[0] in ("kept", "refused", "missed")
            counted[said[0] if known else "faults"] += 1
            if not known or given.show:
                print(f"{seed}: {'; '.join(said)}\n    {draw(seed)}", flush=True)
            if not known and given.keep:
                shutil.copytree(place, given.keep / str(seed), symlinks=True, dirs_exist_ok=True)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    print(json.dumps(dict(counted)), "slowest:", sorted(_slow, reverse=True)[:5])
    return int("faults" in counted)


def _import_all() -> None:
    """What the runs need, once for all of them."""
    import importlib

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name in ("drivetrain.trainer", "torch.distributed.pipelining", "deepspeed", "zmq"):
        importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
