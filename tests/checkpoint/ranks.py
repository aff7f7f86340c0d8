"""Real Gloo ranks for the tests of checkpoints, forked from this process, and a communicator over them."""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it: forking after a multi-threaded operation hangs the child

import torch
import torch.distributed as dist

from tests.patience import LIMIT

torch.set_num_threads(1)


class GlooCommunicator:
    """Plain data as JSON text in byte tensors over the default process group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def all_gather_plain(self, obj: Any) -> list[Any]:
        text = json.dumps(obj).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(text)]))
        longest = int(max(sizes))
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(parts, mine)
        return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = LIMIT) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on ``world_size`` ranks and return what each gave (JSON data)."""
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _child(fn, rank, world_size, args, folder=Path(folder), timeout=timeout)
            pids.append(pid)
        deadline = time.monotonic() + timeout
        codes: dict[int, int] = {}
        while len(codes) < world_size and time.monotonic() < deadline and not any(codes.values()):
            for rank, pid in enumerate(pids):
                if rank not in codes and (status := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(status[1])
            time.sleep(0.005)
        for rank, pid in enumerate(pids):
            if rank not in codes:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
        reports = {rank: Path(folder) / f"{rank}.err" for rank in codes if codes[rank]}
        failed = [
            f"rank {rank}: {file.read_text() if file.exists() else f'it died with exit code {codes[rank]}'}"
            for rank, file in reports.items()
        ]
        assert not failed, "\n".join(failed)
        assert len(codes) == world_size, f"only ranks {sorted(codes)} finished within {timeout} s"
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world_size)]


def _child(
    fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], *, folder: Path, timeout: float
) -> None:
    code = 1
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = f"file://{folder}/store"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        value = fn(rank, world_size, *args)
        (folder / f"{rank}.json").write_text(json.dumps(value))
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        (folder / f"{rank}.err").write_text(traceback.format_exc())
    finally:
        os._exit(code)
