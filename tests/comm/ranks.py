"""Run a function on real Gloo ranks forked from this process, which must have computed nothing with threads."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist

from drivetrain.comm.communicator import Communicator
from tests.patience import GONE, LIMIT

# Forked children of a parent whose intra-op pool has started hang at their first parallel operation.
torch.set_num_threads(1)


def run(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = LIMIT) -> list[Any]:
    """``fn(communicator, *args)`` on ``world_size`` ranks; the results in rank order.

    Raises:
        AssertionError: a rank raised (with its traceback), died, or did not finish in ``timeout`` seconds.
    """
    folder = tempfile.mkdtemp()
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    workers = [
        context.Process(target=_work, args=(rank, world_size, folder, pipes[rank][1], (fn, args)))
        for rank in range(world_size)
    ]
    for worker in workers:
        worker.start()
    for _, sender in pipes:
        sender.close()
    try:
        return _collect([receiver for receiver, _ in pipes], time.monotonic() + timeout)
    finally:
        for worker in workers:
            worker.join(GONE)
            if worker.is_alive():
                worker.kill()
                worker.join()
        for receiver, _ in pipes:
            receiver.close()
        shutil.rmtree(folder)


def _collect(receivers: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        open_ones = [r for i, r in enumerate(receivers) if i not in results]
        ready = wait(open_ones, timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {[i for i in range(len(receivers)) if i not in results]} did not finish in time"
        for receiver in ready:
            rank = receivers.index(receiver)  # type: ignore[arg-type]
            try:
                failure, results[rank] = receiver.recv()  # type: ignore[union-attr]
            except EOFError:
                raise AssertionError(f"rank {rank} died without a result") from None
            assert failure is None, f"rank {rank} failed:\n{failure}"
    return [results[rank] for rank in range(len(receivers))]


def _work(rank: int, world_size: int, folder: str, pipe: Connection, call: tuple[Callable[..., Any], Any]) -> None:
    fn, args = call
    try:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder, 'store')}", rank=rank, world_size=world_size)
        pipe.send((None, fn(Communicator(dist.group.WORLD), *args)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
