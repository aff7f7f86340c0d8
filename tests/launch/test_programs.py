"""Whole programs: a script that has computed with threads, and workers that torchrun or mpirun started."""

from __future__ import annotations

import ctypes
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.launch.start_method import choose, why_not_fork
from tests.launch import programs

# No guard around __main__, as in a notebook: a worker that ran it again would launch without end.
THREADED = """
import torch
from drivetrain.launch import launch
torch.set_num_threads(2)
print(float((torch.ones(5000, 784) / 4).sum()))
scale = 3
def work(job, payload):
    torch.set_num_threads(2)
    x = torch.ones(5000, 784) / payload["by"]
    return [job.rank, float(x.sum()) * scale]
print(launch(work, {"by": 4}, workers=2))
"""

JOINED = """
import torch, torch.distributed as dist
from drivetrain.launch import current_job, destroy_process_group, init_process_group
job = current_job()
init_process_group(job)
x = torch.tensor([job.rank + 1.0])
dist.all_reduce(x)
open(f"rank_{job.rank}", "w").write(f"{job.origin} {job.local_rank} {job.local_world_size} {job.num_nodes} {x.item()}")
destroy_process_group()
"""


def test_script_that_has_computed_with_threads_does_not_hang(tmp_path: Path) -> None:
    code, out, error = programs.run(THREADED, tmp_path, OMP_NUM_THREADS=None, MKL_NUM_THREADS=None)
    assert (code, error) == (0, "")
    assert out == "980000.0\n{0: [0, 2940000.0], 1: [1, 2940000.0]}\n"


def test_a_pool_of_threads_is_seen(run_alone: Callable[..., Any]) -> None:
    def compute() -> list[Any]:
        before = choose("auto")
        torch.set_num_threads(2)
        torch.ones(5000, 784).div_(4)
        return [before, choose("auto"), why_not_fork()]

    assert run_alone(compute) == ["fork", "forkserver", "this process has computed with several threads"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("jemalloc_bg_thd", None), ("cuda0000340000e", None), ("some pool", "has 1 threads of libraries")],
)
def test_a_thread_that_a_fork_does_without_does_not_keep_workers_from_being_forked(
    name: str, reason: str | None, run_alone: Callable[..., Any]
) -> None:
    def compute() -> list[Any]:
        library = ctypes.CDLL(None)
        thread = ctypes.c_ulong()
        library.pthread_create(ctypes.byref(thread), None, library.pause, None)
        library.pthread_setname_np(thread, name.encode())
        return [why_not_fork()]

    (found,) = run_alone(compute)
    assert found is None if reason is None else reason in found


def test_torchrun(tmp_path: Path) -> None:
    # Without a folder for its logs torchrun leaves one in the temporary folder.
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        f"--log-dir={tmp_path}",
    )
    code, _, error = programs.run(JOINED, tmp_path, *torchrun, GLOO_SOCKET_IFNAME=None)
    assert code == 0, error
    assert [(tmp_path / f"rank_{rank}").read_text() for rank in (0, 1)] == [
        "torchrun 0 2 1 3.0",
        "torchrun 1 2 1 3.0",
    ]


TWICE = """
import contextlib, io, os, sys, time
sys.path.insert(0, {repository!r})
from tests.runs import loader, train

made = []
for late, closed in ((0, True), (1, False), (0, False)):
    outcome = train(strategy="ring", devices=2, validation=loader(23, 5, shuffle=False))
    made.append(outcome)
    if closed:
        outcome.trainer.close()
    if int(os.environ["RANK"]) == late:  # the other comes early and must not meet what this one left behind
        time.sleep(1.5)
assert [outcome.curve for outcome in made[1:]] == [made[0].curve] * 2
first = made[0]  # which left the job and comes back
found = first.trainer.validate(first.module, loader(23, 5, shuffle=False), verbose=False)[0]
assert abs(found["val/loss"] - first.metrics["val/loss"]) < 1e-12, (found, first.metrics)
with contextlib.redirect_stderr(io.StringIO()) as told:  # torch puts the rank before each line, with each group again
    sys.excepthook(ValueError, ValueError("of the project"), None)
assert told.getvalue() == "[rank" + os.environ["RANK"] + "]: ValueError: of the project\\n", told.getvalue()
"""


def test_two_trainers_one_after_the_other_under_torchrun(tmp_path: Path, repository: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    torchrun = (*torchrun, f"--log-dir={tmp_path}")
    code, _, error = programs.run(
        TWICE.format(repository=str(repository)), tmp_path, *torchrun, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)
    )
    assert code == 0, error


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun(tmp_path: Path) -> None:
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable)
    code, _, error = programs.run(JOINED, tmp_path, *mpirun, GLOO_SOCKET_IFNAME=None)
    assert code == 0, error
    assert [(tmp_path / f"rank_{rank}").read_text() for rank in (0, 1)] == ["mpi 0 2 1 3.0", "mpi 1 2 1 3.0"]


def test_a_thread_that_is_about_to_end_is_waited_for(run_alone: Callable[..., Any]) -> None:
    """As those of a pool that has just checked a large checkpoint: joined, and for a moment still there."""

    def compute() -> list[Any]:
        library = ctypes.CDLL(None)
        thread = ctypes.c_ulong()
        library.pthread_create(ctypes.byref(thread), None, library.usleep, ctypes.c_void_p(20_000))
        return [why_not_fork()]

    assert run_alone(compute) == [None]
