"""More ranks than there are GPUs: NCCL refuses two ranks of one host on one GPU, so each is a host of its own, to NCCL
and to the Trainer, and messages go through sockets."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.ports import free_port


def start(ranks: int, command: Sequence[str], buffer: int | None = None) -> list[subprocess.Popen[bytes]]:
    """The same command once a rank, told which by the environment. A ``buffer`` of more bytes than NCCL's own carries
    large messages in fewer pieces, each of which waits until the GPU turns to the rank that takes it."""
    port = free_port()
    started = []
    for rank in range(ranks):
        place = {"RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "WORLD_SIZE": ranks}
        nccl = {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1}
        nccl |= {} if buffer is None else {"NCCL_BUFFSIZE": buffer, "NCCL_MAX_NCHANNELS": 1}
        every = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_WORLD_SIZE": ranks, **place, **nccl}
        environment = {**os.environ, **{name: str(value) for name, value in every.items()}}
        started.append(subprocess.Popen(command, env=environment))
    return started


def awaited(result: Path, running: Sequence[subprocess.Popen[bytes]], limit: float) -> str | None:
    """Wait ``limit`` seconds for ``result``, which the first rank renames into place; what ended it before that."""
    deadline = time.monotonic() + limit
    while not result.exists():
        ended = [process.returncode for process in running if process.poll()]
        if ended or time.monotonic() > deadline:
            return f"a rank ended with {ended[0]}" if ended else f"nothing came of it in {limit:.0f} s"
        time.sleep(0.05)
    return None
