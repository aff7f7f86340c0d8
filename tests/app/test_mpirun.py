"""The whole command under mpirun: ranks come from MPI, traffic goes over Gloo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import LIMIT


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun_trains(home: Path, repository: Path) -> None:
    for group, name in (("model", "Tiny"), ("data", "Points")):
        (home / "own" / group).mkdir(parents=True)
        (home / "own" / group / "tiny.yaml").write_text(f"_target_: tests.app.tiny.{name}\n")
    own = ["--config-dir", str(home / "own"), "recipe=none", "model=tiny", "data=tiny", "callbacks=none", "logger=none"]
    mpirun = ["mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", sys.executable]
    done = subprocess.run(
        [*mpirun, str(repository / "train.py"), *own, "strategy=ring", "trainer.max_epochs=2", "hydra.run.dir=run"],
        env={**os.environ, "PYTHONPATH": str(repository), "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor")},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((home / "run" / "run.json").read_text())
    assert (record["status"], record["strategy"], record["world_size"]) == ("completed", "ring", 2)
    assert record["global_step"] == 6
    assert {path.name for path in (home / "run" / "logs").iterdir()} >= {"rank_0.log", "rank_1.log"}
