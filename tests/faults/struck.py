"""What ``tests.faults.torture`` trains, and the callback that does a deed to it at a moment that was drawn."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drivetrain import Callback, DataModule
from drivetrain.errors import DrivetrainError
from drivetrain.support_modules import token_loader
from tests.runs import Classifier, loader
from tests.strategies.gpt import TinyGPT

HOOKS = (
    *("setup", "on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_epoch_start"),
    *("on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"),
    *("on_validation_start", "on_validation_batch_start", "on_validation_epoch_end", "on_validation_end"),
    *("on_train_epoch_end", "on_train_end", "on_fit_end", "on_test_batch_end", "on_test_end", "teardown"),
)
# What a save calls of the system: (module, name).
FILE_CALLS = ("os.fsync", "os.rename", "os.mkdir", "torch.save", "os.open")
REFUSED = {"full": errno.ENOSPC, "readonly": errno.EROFS, "broken": errno.EIO}
TO_THE_LAUNCHER = {"kill launcher": signal.SIGKILL, "term launcher": signal.SIGTERM, "int launcher": signal.SIGINT}
MORE = ("term group", "int twice")
TO_ITSELF = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT, "freeze": signal.SIGSTOP}


@dataclass(frozen=True)
class Strike:
    """A deed at a moment.

    Attributes:
        deed: what is done.
        rank: the worker that does it, mostly to itself.
        moment: a hook, ``"later"`` (seconds after set-up, from a thread), one of :data:`FILE_CALLS` during a save, or
            ``"outside"`` (seconds after the launcher's start, by who watches it).
        count: at which of the moments of this kind.
        seconds: for ``"later"`` and ``"outside"``.
    """

    deed: str
    rank: int
    moment: str
    count: int = 1
    seconds: float = 0.0


END = "end.ckpt"
WHERE, WHAT = "DRIVETRAIN_TORTURE_NOTES", "DRIVETRAIN_TORTURE_STRIKE"  # variables, which every start method passes on


def notes() -> Path:
    """Where it is written that it happened, and who the workers and the launcher are."""
    return Path(os.environ[WHERE])


def wanted() -> Strike | None:
    """What is to be done in this run."""
    return Strike(**json.loads(os.environ[WHAT])) if WHAT in os.environ else None


def launcher() -> int:
    return int((notes() / "launcher").read_text())


class Gpt(TinyGPT):
    def __init__(self) -> None:
        super().__init__(layers=2)


class Tokens(DataModule):
    """59 samples to train with, 23 to validate and 9 to test."""

    def __init__(self, workers: int = 0, batch_size: int = 8) -> None:
        super().__init__()
        self.workers, self.batch_size = workers, batch_size

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            token_loader(59).dataset, self.batch_size, shuffle=True, num_workers=self.workers
        )

    def val_dataloader(self) -> Any:
        return token_loader(23, 5, shuffle=False)

    def test_dataloader(self) -> Any:
        return token_loader(9, 4, shuffle=False)


class Points(Tokens):
    """The same numbers of samples of :class:`tests.runs.Classifier`."""

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(loader(59).dataset, self.batch_size, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> Any:
        return loader(23, 5, shuffle=False)

    def test_dataloader(self) -> Any:
        return loader(9, 4, shuffle=False)


class Struck(Callback):
    """Does what is wanted in the worker that it names, takes its time over each batch, and saves at the end."""

    saves_checkpoints = True

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.rank = -1
        self.strike = wanted()

    def _at(self, moment: str) -> None:
        self.seen[moment] += 1
        strike = self.strike
        if strike is None:
            (notes() / f"seen_{self.rank}").write_text(json.dumps(self.seen))
        elif (strike.moment, strike.rank, strike.count) == (moment, self.rank, self.seen[moment]):
            do(strike)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.rank < 0:
            self.rank = trainer.global_rank
            (notes() / f"worker_{self.rank}").write_text(str(os.getpid()))
            strike = self.strike
            if strike is not None and (strike.moment, strike.rank) == ("later", self.rank):
                timer = threading.Timer(strike.seconds, do, [strike])
                timer.daemon = True
                timer.start()
            for call in FILE_CALLS:
                self._intercept(call)
        self._at("setup")

    def _intercept(self, name: str) -> None:
        where: Any = {"os": os, "torch": torch}[name.partition(".")[0]]
        called: Callable[..., Any] = getattr(where, name.partition(".")[2])

        def instead(*args: Any, **kwargs: Any) -> Any:
            if _of_a_save(args):
                self._at(name)
            return called(*args, **kwargs)

        setattr(where, name.partition(".")[2], instead)


def _of_a_save(args: Any) -> bool:
    """Whether a call is about a checkpoint, or about an open file."""
    return not isinstance(args[0], str | bytes | os.PathLike) or ".ckpt" in os.fsdecode(args[0])


def _hook(name: str) -> Callable[..., None]:
    def hook(self: Struck, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if name == "on_train_batch_start":
            time.sleep(0.004)
        self._at(name)
        if name == "on_train_end":
            trainer.save_checkpoint(Path(trainer.default_root_dir) / END)

    return hook


for _name in HOOKS[1:]:
    setattr(Struck, _name, _hook(_name))


def note(what: str) -> None:
    """Leave the moment, and which process it is about."""
    beside = notes() / f"struck.{os.getpid()}"
    beside.write_text(f"{time.monotonic()} {os.getpid()} {what}")
    beside.replace(notes() / "struck")


def _workers() -> list[int]:
    """Those that were set up, this process last."""
    found = [int(one.read_text()) for one in notes().glob("worker_*")]
    return sorted(found, key=lambda pid: pid == os.getpid())


def do(strike: Strike) -> None:
    """The deed, in the worker that it is about."""
    note(strike.deed)
    deed = strike.deed
    if deed in TO_THE_LAUNCHER:
        os.kill(launcher(), TO_THE_LAUNCHER[deed])
    elif deed == "term group":
        for pid in (launcher(), *_workers()):
            os.kill(pid, signal.SIGTERM)
    elif deed == "int twice":
        os.kill(launcher(), signal.SIGINT)
        time.sleep(0.1)
        os.kill(launcher(), signal.SIGINT)
    elif deed in TO_ITSELF:
        os.kill(os.getpid(), TO_ITSELF[deed])
    elif deed == "kill all":
        for pid in _workers():
            os.kill(pid, signal.SIGKILL)
    elif deed in ("leave 0", "leave 3"):
        os._exit(int(deed[-1]))
    elif deed in REFUSED:
        raise OSError(REFUSED[deed], os.strerror(REFUSED[deed]))
    else:
        raise RuntimeError("struck")


def drawn_strike(rng: random.Random, seen: list[dict[str, int]], total: float, trained: float) -> Strike:
    """Any deed at any moment at which it can be done.

    Args:
        seen: how often each rank came to each moment in a run to which nothing was done.
        total, trained: seconds that it took, and that its workers took after set-up.
    """
    rank = rng.randrange(len(seen))
    kind = rng.choice(["hook", "hook", "hook", "later", "save", "save", "outside"])
    anywhere = ["kill", "kill", "kill all", "freeze", "leave 0", "leave 3", *TO_THE_LAUNCHER, *MORE, "term", "int"]
    if kind == "outside":
        deeds = ["kill", "kill", "kill all", *TO_THE_LAUNCHER, "int launcher", "term"]
        return Strike(rng.choice(deeds), rank, "outside", seconds=rng.uniform(0.0, total))
    if kind == "later":
        return Strike(rng.choice(anywhere), rank, "later", seconds=rng.uniform(0.0, trained))
    refused = [*REFUSED] * 3 if kind == "save" else ["raise"] * 3
    moments = [moment for moment in sorted(seen[rank]) if (moment in FILE_CALLS) is (kind == "save")]
    moment = rng.choice(moments or sorted(seen[rank]))
    return Strike(rng.choice([*anywhere, *refused]), rank, moment, rng.randint(1, seen[rank][moment]))


def as_lightning(words: dict[str, Any], folder: Path, resume: bool) -> int:
    """The same run under Lightning's names, its checkpoints in files; returns the exit code of a script that says what
    drivetrain raises."""
    import drivetrain.lightning as ours

    given = {name.removeprefix("trainer."): value for name, value in words.items() if name.startswith("trainer.")}
    options = {name.removeprefix("strategy."): value for name, value in words.items() if name.startswith("strategy.")}
    saves = {name.removeprefix("checkpoint."): value for name, value in words.items() if name.startswith("checkpoint.")}
    for name in ("every_n_train_steps", "save_top_k"):
        saves |= {name: int(saves[name])} if name in saves else {}
    numbers = {name: float(value) if "." in value else int(value) for name, value in given.items()}
    saving = ours.callbacks.ModelCheckpoint(folder / "checkpoints", save_last=True, **saves)
    asynchronous = [ours.plugins.AsyncCheckpointIO()] if words["logger"] == "csv" else []
    try:
        ours.seed_everything(3)
        trainer = ours.Trainer(
            strategy={"name": words["strategy"], **{name: _plain(value) for name, value in options.items()}},
            devices=int(words["devices"]), precision=words["precision"], callbacks=[Struck(), saving], batch="global",
            default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
            plugins=asynchronous, accelerator="cpu", compression=words.get("compression", "none"), **numbers,
        )  # fmt: skip
        gpt = words["+model._target_"].endswith("Gpt")
        data = (Tokens if gpt else Points)(int(words["+data.workers"]))
        there = resume and any((folder / "checkpoints").glob("*.ckpt"))
        trainer.fit(Gpt() if gpt else Classifier(), datamodule=data, ckpt_path="last" if there else None)
    except DrivetrainError as error:
        print(f"error: {error}", flush=True)
        return error.exit_code
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def _plain(text: str) -> Any:
    return {"true": True, "false": False}.get(text) if text in ("true", "false") else _number(text)


def _number(text: str) -> Any:
    return int(text) if text.removeprefix("-").isdecimal() else text
