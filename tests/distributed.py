"""Run a function on N real ranks: forked from this process, joined by Gloo on loopback, gone when the call returns.

Forking is quick (tens of milliseconds) because torch is imported here already, and safe because this process never
computes with more than one torch thread: a forked child of a process whose thread pools have started would hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.patience import GONE, LIMIT
from tests.ports import free_port

PR_SET_PDEATHSIG = 1
ENDS = GONE  # seconds that a rank's own processes have to end
SETTLE = 0.5  # seconds that the other ranks have to report an earlier failure


class RankError(AssertionError):
    """A rank failed; the message holds its traceback. ``rank`` is the first that did."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"rank {rank} failed:\n{cause}")
        self.rank = rank
        self.cause = cause


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = LIMIT) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on ``world_size`` Gloo ranks and return their values in rank order.

    The default process group exists when ``fn`` starts and is destroyed after every rank has finished. Values are plain
    data or tensors (what ``torch.load(weights_only=True)`` takes). ``fn`` may be a closure: nothing is pickled.

    Raises:
        RankError: a rank raised, died, or did not finish within ``timeout`` seconds. All ranks are killed by then.
    """
    return _run(fn, world_size, args, timeout, group=True)


def run_alone(fn: Callable[..., Any], *args: Any, timeout: float = LIMIT) -> Any:
    """Run ``fn(*args)`` in one forked child without a process group and return its value.

    For tests that would leave something in this process: threads of torch, global random state, a CUDA context.

    Raises:
        RankError: as :func:`run_ranks`.
    """
    return _run(lambda rank, world_size, *rest: fn(*rest), 1, args, timeout, group=False)[0]


def run_job(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = LIMIT) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on ranks that another launcher seems to have started, as torchrun does: their
    place is in the environment, and there is no process group.

    Raises:
        RankError: as :func:`run_ranks`.
    """
    port = free_port()

    def placed(rank: int, size: int, *rest: Any) -> Any:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}})
        return fn(rank, size, *rest)

    return _run(placed, world_size, args, timeout, group=False)


def _run(fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float, *, group: bool) -> list[Any]:
    if torch.get_num_threads() != 1:
        raise RuntimeError("forking ranks is only safe while torch computes with one thread; a test changed it")

    context = multiprocessing.get_context("fork")
    # Where loader processes put their sockets: Python's own folder for them stays where torch ends one that is slow to.
    sockets = tempfile.mkdtemp(prefix="ranks-")
    listener = socket.create_server(("127.0.0.1", 0))
    ends = [context.Pipe() for _ in range(world_size)]
    ours = [mine for mine, _ in ends]

    def child(rank: int) -> None:
        for other, (mine, theirs) in enumerate(ends):  # a copy held here would hide the parent's death from the others
            mine.close()
            if other != rank:
                theirs.close()
        multiprocessing.current_process()._config["tempdir"] = sockets  # type: ignore[attr-defined]
        _child(fn, rank, world_size, args, timeout=timeout, end=ends[rank][1], listener=listener if group else None)

    processes = [context.Process(target=child, args=(rank,), name=f"rank-{rank}") for rank in range(world_size)]
    try:
        for process in processes:
            process.start()
        listener.close()
        for _, theirs in ends:
            theirs.close()
        values = _collect(ours, processes, timeout)
        for end in ours:
            with contextlib.suppress(BrokenPipeError):
                end.send_bytes(b"end")
        for process in processes:
            process.join(timeout=GONE)
        for rank, process in enumerate(processes):
            if _alive_in_group(process.pid, settle=ENDS):
                raise RankError(rank, f"it left a process behind, or did not end: exit code {process.exitcode}")
        return values
    finally:
        listener.close()
        for process in processes:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
                process.close()
        for mine, theirs in ends:
            mine.close()
            theirs.close()
        shutil.rmtree(sockets, ignore_errors=True)


def _collect(ours: list[Connection], processes: list[Any], timeout: float) -> list[Any]:
    """Every rank's value; or the failure that came first in time."""
    values: list[Any] = [None] * len(ours)
    failures: list[tuple[float, int, str]] = []
    waiting = {end: rank for rank, end in enumerate(ours)}
    deadline = time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        for end in wait(list(waiting), timeout=left):
            assert isinstance(end, Connection)
            rank = waiting.pop(end)
            try:
                report = torch.load(io.BytesIO(end.recv_bytes()), weights_only=True)
            except (EOFError, ConnectionResetError):
                processes[rank].join(GONE)
                failures.append((time.monotonic(), rank, f"it died with exit code {processes[rank].exitcode}"))
            else:
                if "cause" in report:
                    failures.append((report["time"], rank, report["cause"]))
                else:
                    values[rank] = report["value"]
        if failures:
            deadline = min(deadline, time.monotonic() + SETTLE)
    if failures:
        _, rank, cause = min(failures)
        raise RankError(rank, cause)
    if waiting:
        late = sorted(waiting.values())
        raise RankError(late[0], f"ranks {late} did not finish within {timeout} s")
    return values


def _child(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    *,
    timeout: float,
    end: Connection,
    listener: socket.socket | None,
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()  # one kill reaches the processes that this rank starts
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    try:
        if listener is not None:
            _join(rank, world_size, listener, timeout)
        buffer = io.BytesIO()
        torch.save({"value": fn(rank, world_size, *args)}, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)  # fails here, with the rank, rather than there
    except BaseException:
        buffer = io.BytesIO()
        torch.save({"time": time.monotonic(), "cause": traceback.format_exc()}, buffer)
        end.send_bytes(buffer.getvalue())
        return
    end.send_bytes(buffer.getvalue())
    with contextlib.suppress(EOFError):
        end.recv_bytes()  # rank 0 hosts the store: nobody leaves before all have finished
    if listener is not None and dist.is_initialized():
        dist.destroy_process_group()


def _join(rank: int, world_size: int, listener: socket.socket, timeout: float) -> None:
    port = listener.getsockname()[1]
    limit = timedelta(seconds=timeout)
    descriptor = listener.detach()
    if rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", port, world_size, True, timeout=limit, master_listen_fd=descriptor, wait_for_workers=False
        )
    else:
        os.close(descriptor)
        store = dist.TCPStore("127.0.0.1", port, world_size, False, timeout=limit, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)


def _alive_in_group(group: int, settle: float) -> bool:
    """Whether a process of ``group`` still runs after ``settle`` seconds; the ended that nobody reaped do not count."""
    deadline = time.monotonic() + settle
    while _runs_in_group(group):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.02)
    return False


def _runs_in_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as file:
                    state, _, pgrp = file.read().rpartition(")")[2].split()[:3]  # the name may hold spaces
                if int(pgrp) == group and state not in "ZX":
                    return True
    return False
