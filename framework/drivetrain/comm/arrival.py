"""Barriers that say who did not come."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from drivetrain.comm.arguments import is_whole
from drivetrain.comm.failures import CommunicationError, first_line

if TYPE_CHECKING:
    from drivetrain.comm.communicator import Communicator

LONGEST = 1e9  # seconds: as good as for ever


def barrier(comm: Communicator, timeout: float | None) -> None:
    """See :meth:`drivetrain.comm.Communicator.barrier`."""
    if timeout is not None and (not (is_whole(timeout) or isinstance(timeout, float)) or not timeout > 0):
        raise CommunicationError(
            f"the barrier of group {comm.label!r} got timeout={timeout!r}: pass seconds above zero, or None."
        )
    if comm.group is None:
        return
    started = time.perf_counter()
    comm.barriers += 1
    # The transport counts milliseconds, takes none for its own time-out, and knows no time without an end.
    limit = None if timeout is None else timedelta(seconds=float(min(max(timeout, 1e-3), LONGEST)))
    try:
        # Each rank leaves its mark, for whoever wants to know afterwards who came.
        store(comm).set(_mark(comm.rank), str(comm.barriers))
        if comm.device.type == "cpu":
            dist.monitored_barrier(comm.group, timeout=limit, wait_all_ranks=True)
        else:
            _device_barrier(comm, timeout)
    except RuntimeError as error:
        waited = time.perf_counter() - started
        missing = absent(comm)
        who = f"rank {', '.join(map(str, missing))} did not arrive" if missing else "not every rank came"
        raise CommunicationError(
            f"rank {comm.rank} waited {waited:.1f} s at the barrier of group {comm.label!r} and {who}"
            f" ({first_line(error)}): see the logs of the ranks named, or allow a longer timeout."
        ) from error
    comm.statistics.record("barrier", messages=1, seconds=time.perf_counter() - started)


def store(comm: Communicator) -> Any:
    """The key-value store of the communicator's group."""
    assert comm.group is not None
    own = getattr(comm.group, "get_group_store", None)
    if own is not None:
        return own()
    # Before torch had a store for each group: the job's, and there a place for the group.
    return dist.PrefixStore(comm.group.group_name, dist.distributed_c10d._get_default_store())


def _mark(rank: int) -> str:
    return f"drivetrain/barrier/{rank}"


def absent(comm: Communicator) -> list[int]:
    """The ranks that have not left their mark at this rank's latest barrier; none where the store is gone too."""
    missing = []
    try:
        marks = store(comm)
        for rank in range(comm.world_size):
            key = _mark(rank)
            if not marks.check([key]) or int(marks.get(key)) < comm.barriers:
                missing.append(rank)
    except RuntimeError:
        return []
    return missing


def _device_barrier(comm: Communicator, timeout: float | None) -> None:
    work = dist.barrier(group=comm.group, async_op=True, device_ids=[comm.device.index or 0])
    # Waiting for NCCL takes no timeout of its own, so it is asked until the time is up.
    deadline = None if timeout is None else time.monotonic() + timeout
    while deadline is not None and not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out after {timeout} s")
        time.sleep(0.0005)
    work.wait()
