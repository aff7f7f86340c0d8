"""The default process group of a job: made with one call on every rank, taken down with one that never hangs."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from drivetrain.errors import ConfigurationError
from drivetrain.launch import stores, transport_threads
from drivetrain.launch.interfaces import interface_towards
from drivetrain.launch.job import Job

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

PARTING = 5.0  # seconds that rank 0 keeps its store for the others, and that taking down a group may take
INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass
class _Joined:
    """The one job that this process has joined: its store, whether it hosts it, whether Gloo was told the interface;
    how many it joined before, one after the other; what listens for all of them, by port; and what told of exceptions
    before torch's own did, which puts the rank before each line, with that."""

    job: Job = field(default_factory=Job)
    store: Store | None = None
    hosting: bool = False
    interface_set: bool = False
    count: int = 0
    listening: dict[int, Store] = field(default_factory=dict)
    hooks: tuple[Callable[..., Any], Callable[..., Any]] | None = None


_joined = _Joined()


def job_store() -> Store:
    """The store of the job that :func:`init_process_group` has joined: keys that all its ranks see.

    Raises:
        ConfigurationError: no job was joined, or it has one worker and no store.
    """
    if _joined.store is None:
        raise ConfigurationError("there is no store: the job has one worker or init_process_group was not called")
    return _joined.store


def init_process_group(job: Job, *, device: torch.device | None = None) -> None:
    """Make the default process group of ``job`` with its backend and time-out. Nothing to do for one worker.

    Args:
        job: this worker's place.
        device: the worker's device; bound to the group where it is a GPU.

    Raises:
        ConfigurationError: the store cannot be reached, the port is taken, or not all ranks came in time.
    """
    if job.world_size == 1:
        return
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        raise ConfigurationError("the default process group exists already: destroy it before another job is joined")
    _choose_interface(job)
    bound = device if device is not None and device.type == "cuda" else None
    if bound is not None:
        torch.cuda.set_device(bound)
    _joined.job = job
    try:
        tcp, _joined.hosting = _open_store(job)
        # Neither the addresses of an attempt that died may be read, nor those of a group that was there before.
        _joined.store = dist.PrefixStore(f"attempt_{job.attempt}/group_{_joined.count}", tcp)
        _joined.count += 1
        _joined.store.set(f"here_{job.rank}", "1")
        stores.wait(_joined.store, [f"here_{rank}" for rank in range(job.world_size)], job.timeout)
        hook = _former_hook()
        dist.init_process_group(
            job.backend,
            store=dist.PrefixStore("default_group", _joined.store),
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout),
            device_id=bound,
        )
        _joined.hooks = hook, sys.excepthook
        _pass_over_what_is_inherited()
        transport_threads.await_them()
    except BaseException as error:
        missing = _missing() if isinstance(error, RuntimeError) else []
        _forget()
        if isinstance(error, (RuntimeError, ValueError)):
            reason = str(error).splitlines()[0]
            if missing:
                ranks = "rank" if len(missing) == 1 else "ranks"
                reason = f"{ranks} {', '.join(map(str, missing))} did not come within {job.timeout:g} s"
            raise ConfigurationError(
                f"rank {job.rank} of {job.world_size} could not start {job.backend} through "
                f"{job.master_addr}:{job.master_port} ({reason}): see that all ranks run and reach that address, that "
                "each makes the same calls of a Trainer, and that MASTER_PORT is free"
            ) from error
        raise


def _former_hook() -> Callable[..., Any]:
    """What tells of exceptions, without what torch added for an earlier group: it adds that for each."""
    if _joined.hooks is not None and sys.excepthook is _joined.hooks[1]:
        sys.excepthook = _joined.hooks[0]
    return sys.excepthook


@cache
def _pass_over_what_is_inherited() -> None:
    """Python's collector, in a process that is forked from this one (a loader's), would end what nobody uses any more,
    a group of an earlier run too, which waits for its threads to end: and a fork copies no threads."""
    os.register_at_fork(after_in_child=gc.freeze)


def init_group_of_one(job: Job, device: torch.device) -> bool:
    """Make the default process group of a job of one worker, for code that asks and calls ``torch.distributed``; False
    where there is one already. It needs no port: its store is in this process."""
    import torch.distributed as dist

    if not dist.is_available() or dist.is_initialized():
        return False
    _choose_interface(job)
    bound = device if device.type == "cuda" else None
    dist.init_process_group(job.backend, store=dist.HashStore(), rank=0, world_size=1, device_id=bound)
    return True


def destroy_process_group(*, failed: bool = False) -> None:
    """Take down all groups of this process; without a group nothing happens. Returns within seconds whatever others do.

    Args:
        failed: whether the job failed: then nobody is waited for.
    """
    import torch.distributed as dist

    if _joined.hosting and not failed:
        _let_others_leave_first()
    elif _joined.store is not None and not failed:
        _say_goodbye()
    if dist.is_initialized():
        # In a thread, for NCCL may wait here for a rank that is gone.
        thread = threading.Thread(target=dist.destroy_process_group, name="destroy-process-group", daemon=True)
        thread.start()
        thread.join(timeout=PARTING)
    _forget()


def _open_store(job: Job) -> tuple[Store, bool]:
    """The job's store and whether this process hosts it."""
    agent_hosts = job.origin == "local" or (
        job.origin == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    )
    if job.rank == 0 and not agent_hosts:
        # It stays for the next group of the job: others may come to it before this process has left the last one, and
        # who still holds that one's store keeps the port.
        if job.master_port not in _joined.listening:
            store = stores.host(job.master_port, loopback=job.num_nodes == 1, timeout=job.timeout)
            _joined.listening[job.master_port] = store
        return _joined.listening[job.master_port], True
    who = f"rank {job.rank} of {job.world_size}"
    store = stores.join(job.master_addr, job.master_port, who=who, wait=job.timeout, timeout=job.timeout)
    return store, False


def _choose_interface(job: Job) -> None:
    """Gloo itself would resolve the host's name, which may have no address, or one that others cannot reach. On one
    host it need not listen where others can connect."""
    if INTERFACE in os.environ:
        return
    if job.num_nodes == 1:
        chosen = "lo" if "lo" in (name for _, name in socket.if_nameindex()) else None
    else:
        chosen = interface_towards(job.master_addr)
    if chosen is not None:
        _joined.interface_set = True
        os.environ[INTERFACE] = chosen  # stays: groups that are made later read it too


def _missing() -> list[int]:
    """The ranks that have not come to the group; none where that cannot be known."""
    if _joined.store is None:
        return []
    try:
        return [rank for rank in range(_joined.job.world_size) if not _joined.store.check([f"here_{rank}"])]
    except RuntimeError:
        return []  # who hosts the store is gone


def _say_goodbye() -> None:
    assert _joined.store is not None
    try:
        _joined.store.set(f"left_{_joined.job.rank}", "1")
    except RuntimeError:
        return  # who hosts the store did not wait: there is nobody to tell


def _let_others_leave_first() -> None:
    assert _joined.store is not None
    others = [f"left_{rank}" for rank in range(_joined.job.world_size) if rank != _joined.job.rank]
    deadline = time.monotonic() + PARTING
    while not _joined.store.check(others) and time.monotonic() < deadline:
        time.sleep(0.01)


def _forget() -> None:
    if _joined.interface_set:
        os.environ.pop(INTERFACE, None)
    _joined.store, _joined.hosting, _joined.interface_set = None, False, False
