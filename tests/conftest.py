"""Fixtures of the whole test suite: real ranks, and nothing left behind.

This process never computes with several torch threads (see ``tests/distributed.py``), and has a temporary folder of its
own, so that a file left there is a leak of a test and not of a neighbour.
"""

from __future__ import annotations

import os

# Before anything imports torch or OpenMP: they read these once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
# With GPUs in sight torch's first backward starts a thread for each; what needs GPUs is in tests/gpu.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import gc
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import distributed, leaks

pytest_plugins = ["pytester"]

torch.set_num_threads(1)

# An example that takes long on a machine that is busy is none that fails.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path outlives the run, for a look at it
    own = tempfile.mkdtemp(prefix="drivetrain-tests-")
    os.environ["TMPDIR"] = own
    tempfile.tempdir = own
    # What this user's machine was calibrated to does not choose algorithms here. What pip has is as good as ever.
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    os.environ.setdefault("PIP_CACHE_DIR", os.path.join(caches, "pip"))
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="cache-")
    # Torch's compiler sets this and makes the folder when it is first looked at, in whichever test that is.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")
    config.add_cleanup(lambda: shutil.rmtree(own, ignore_errors=True))
    # A shell starts what runs in the background deaf to it, and so would be the programs whose end is tested.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    # What has been imported stays. Collections would go through all of it again and again, in each forked rank too.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process, thread, port, variable, signal handler, process group or file behind."""
    before = leaks.snapshot()
    yield
    lines = leaks.left_behind(before)
    if lines:
        pytest.fail("the test left behind: " + "; ".join(lines), pytrace=False)


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """``run_ranks(fn, world_size, *args, timeout=LIMIT)``: see :func:`tests.distributed.run_ranks`."""
    return distributed.run_ranks


@pytest.fixture
def run_alone() -> Callable[..., Any]:
    """``run_alone(fn, *args, timeout=LIMIT)``: see :func:`tests.distributed.run_alone`."""
    return distributed.run_alone


@pytest.fixture
def repository() -> Path:
    """The folder that holds ``framework``, ``plugins``, ``conf`` and ``tests``."""
    return Path(__file__).resolve().parent.parent
