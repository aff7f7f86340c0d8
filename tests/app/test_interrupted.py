"""The whole command, ``python train.py``, is asked to stop: it saves, leaves nobody behind, and goes on from there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drivetrain import checkpoint
from tests.launch.programs import all_gone, descendants
from tests.patience import GONE, LIMIT

WORDS = ["recipe=none", "model=tiny", "data=tiny", "callbacks=none", "logger=none", "precision=64-true", "task=fit"]
WORDS += ["strategy=ring", "devices=2", "trainer.max_epochs=100000", "trainer.log_every_n_steps=1", "hydra.run.dir=run"]


def _usual_signals() -> None:
    """A shell that starts something in the background has it ignore SIGINT, and that is inherited."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


@contextmanager
def _started(folder: Path, repository: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(repository / "train.py"), "--config-dir", str(folder / "own"), *WORDS, *words]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=_usual_signals,  # noqa: PLW1509  no threads here that could hold a lock
    )
    try:
        yield process
    finally:
        for one in descendants(process.pid):
            one.kill()
        process.kill()
        process.communicate()


def _steps(folder: Path) -> int:
    """Steps of the last checkpoint; 0 where there is none."""
    found = checkpoint.find.resolve("auto", folder / "run" / "checkpoints")
    return 0 if found is None else int(checkpoint.load(found).meta["global_step"])


def _saves(folder: Path, done: int) -> bool:
    """Whether there is a checkpoint of a step after ``done``: that of ``done`` itself may be made once more, where the
    first start ended with an epoch. They come and go, so nothing is read here."""
    names = [path.name for path in (folder / "run" / "checkpoints").glob("*.ckpt")]
    return any(int(found[1]) > done for found in map(re.compile(r"step=(\d+)").search, names) if found)


def test_interrupted_and_gone_on_twice(tmp_path: Path, repository: Path) -> None:
    """Ctrl-C, which a terminal sends to the launcher's group, then SIGTERM to the launcher alone, as a scheduler may.
    Both in one run, for a start takes seconds."""
    for group, name in (("model", "Tiny"), ("data", "Points")):
        (tmp_path / "own" / group).mkdir(parents=True)
        (tmp_path / "own" / group / "tiny.yaml").write_text(f"_target_: tests.app.tiny.{name}\n")
    done = 0
    for signum, resume in ((signal.SIGINT, "null"), (signal.SIGTERM, "run")):
        with _started(tmp_path, repository, f"resume={resume}") as process:
            deadline = time.monotonic() + LIMIT
            while not _saves(tmp_path, done):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            below = descendants(process.pid)
            assert len(below) >= 2
            if signum == signal.SIGINT:
                os.killpg(process.pid, signum)
            else:
                process.send_signal(signum)
            told, _ = process.communicate(timeout=LIMIT)
            assert process.returncode == 128 + signum, told
            assert all_gone(below, GONE)
        record = json.loads((tmp_path / "run" / "run.json").read_text())
        assert record["status"] == "interrupted"
        saved = _steps(tmp_path)
        assert saved == record["global_step"] > done
        # What an earlier start has trained is part of the run.
        assert [step for step, _ in record["loss_curve"]] == list(range(1, saved + 1))
        done = saved
