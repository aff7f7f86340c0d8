"""``python train.py`` in a process group of its own, as a shell starts it: a signal to the group ends it in order."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from drivetrain import checkpoint
from tests.launch.programs import all_gone, descendants, wait_for

WITHIN = 5.0


def _words(folder: Path) -> list[str]:
    """Hundreds of epochs of the tiny recipe, slow from step 3 on."""
    for group, name in (("model", "Tiny"), ("data", "Points")):
        (folder / "own" / group).mkdir(parents=True, exist_ok=True)
        (folder / "own" / group / "tiny.yaml").write_text(f"_target_: tests.app.tiny.{name}\n")
    slow = f"{{_target_: tests.faults.programs.Slow, folder: {folder}, moment: train, step: 3}}"
    chosen = ["recipe=none", "model=tiny", "data=tiny", "logger=none", "callbacks=none", f"+callbacks.slow={slow}"]
    return ["--config-dir", str(folder / "own"), *chosen, "accelerator=cpu", "task=fit", "trainer.max_epochs=500"]


def _start(repository: Path, folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / "temporary").mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(repository), "TMPDIR": str(folder / "temporary")}
    return subprocess.Popen(
        [sys.executable, str(repository / "train.py"), *_words(folder), *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("strategy", "devices", "signum", "code", "resumed"),
    [("ring", 2, signal.SIGINT, 130, True), ("single", 1, signal.SIGTERM, 143, False)],
)
def test_a_signal_to_the_group(
    strategy: str, devices: int, signum: int, code: int, resumed: bool, tmp_path: Path, repository: Path
) -> None:
    words = [f"strategy={strategy}", f"devices={devices}", "hydra.run.dir=run"]
    process = _start(repository, tmp_path, *words)
    below: list[psutil.Process] = []
    try:
        wait_for(*(tmp_path / f"reached_{rank}" for rank in range(devices)), seconds=60)
        below = descendants(process.pid)
        assert len(below) >= (devices if devices > 1 else 0)
        began = time.monotonic()
        os.killpg(process.pid, signum)
        output, _ = process.communicate(timeout=WITHIN + 5)
        assert time.monotonic() - began < WITHIN
    finally:
        process.kill()
        for one in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    assert process.returncode == code, output
    assert "Traceback" not in output, output
    assert all_gone(below, 1.0)
    assert not list((tmp_path / "temporary").glob("drivetrain-*"))
    last = checkpoint.find.resolve("last", tmp_path / "run" / "checkpoints")
    assert last is not None
    step = checkpoint.load(last, world_size=devices).meta["global_step"]
    assert step >= 3
    if not resumed:
        return
    more = _start(
        repository,
        tmp_path,
        *words[:2],
        "hydra.run.dir=more",
        f"resume={tmp_path}/run",
        f"trainer.max_steps={step + 2}",
    )
    output, _ = more.communicate(timeout=60)
    assert more.returncode == 0, output
    ended = checkpoint.find.resolve("last", tmp_path / "more" / "checkpoints")
    assert ended is not None, output
    assert checkpoint.load(ended, world_size=devices).meta["global_step"] == step + 2
