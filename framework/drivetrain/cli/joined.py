"""How the ranks that another launcher started, or the nodes of a job, agree on one run folder: each runs the app.

The name of the folder holds the time of day, so that only rank 0 may choose it. It goes through the store at the job's
master address, the same that the process group is made with later: torchrun's agent or our launcher hosts it; otherwise
rank 0 does, here, for the whole run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.errors import ConfigurationError
from drivetrain.launch.job import Job

if TYPE_CHECKING:
    from torch.distributed import Store

# "True" where torchrun's agent hosts the store.
AGENT_HOSTS = "TORCHELASTIC_USE_AGENT_STORE"
PARTING = 15.0  # seconds that rank 0 keeps its store for the others, who may still be importing torch


@dataclass
class Meeting:
    """The ranks of a joined job before it has a process group. ``job`` is this rank's place from here on."""

    job: Job
    store: Store | None

    def tell(self, run_folder: Path | None, error: str | None = None) -> None:
        """Rank 0: hand over the folder, or the sentence that ends the job."""
        if self.store is not None:
            folder = None if run_folder is None else str(run_folder)
            self.store.set("run", json.dumps({"folder": folder, "error": error}))

    def hear(self) -> Path:
        """Other ranks: the folder. Raises :class:`ConfigurationError` with rank 0's sentence if it has none."""
        assert self.store is not None
        told: dict[str, Any] = json.loads(self.store.get("run").decode())
        if told["error"] is not None:
            raise ConfigurationError(told["error"])
        return Path(told["folder"])


@contextmanager
def meeting(job: Job, start_timeout: float) -> Iterator[Meeting]:
    """Open the store for as long as the run lasts."""
    if job.world_size == 1:
        yield Meeting(job, None)
        return
    from torch.distributed import PrefixStore

    from drivetrain.launch import stores

    there = job.origin == "local" or (job.origin == "torchrun" and os.environ.get(AGENT_HOSTS) == str(True))
    hosting = job.rank == 0 and not there
    if hosting:
        tcp = stores.host(job.master_port, loopback=job.num_nodes == 1, timeout=job.timeout)
    else:
        who = f"rank {job.rank} of {job.world_size}"
        tcp = stores.join(job.master_addr, job.master_port, who=who, wait=start_timeout, timeout=job.timeout)
    store, failed = PrefixStore(f"app_{job.attempt}", tcp), True
    try:
        # As under our own launcher, whose ranks all join a store that is there.
        yield Meeting(job if there else replace(job, origin="local"), store)
        failed = False
    except ConfigurationError:
        failed = False
        raise
    finally:
        _part(store, job, hosting, failed)


def _part(store: Store, job: Job, hosting: bool, failed: bool) -> None:
    """The host leaves last, unless it failed: then the others may be gone, and nobody is waited for."""
    if not hosting:
        with suppress(RuntimeError):  # who hosts it did not wait: there is nobody to tell
            store.set(f"left_{job.rank}", "1")
        return
    if failed:
        return
    others = [f"left_{rank}" for rank in range(1, job.world_size)]
    deadline = time.monotonic() + PARTING
    while not store.check(others) and time.monotonic() < deadline:
        time.sleep(0.01)


@contextmanager
def logged(folder: Path, rank: int) -> Iterator[None]:
    """Keep what this rank prints in ``folder/rank_N.log`` too; who started it decides what reaches the terminal."""
    from drivetrain.launch.worker import Tee

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"rank_{rank}.log", "a", buffering=1, encoding="utf-8", errors="replace") as log:
        out, err = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = Tee(out, log), Tee(err, log)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = out, err
