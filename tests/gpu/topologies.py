"""Every topology over NCCL, run by hand on a machine with GPUs: ``python -m tests.gpu.topologies [RANKS]``.

As the test of the CPU judges them: all operations and dtypes, sizes that do not divide, the same bits on every rank,
the schedule's own counts. The command fails with the first thing that is not as it should be.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "comm"))

import test_execute

from drivetrain.comm.measure import join_group, run_ranks


def judged(rank: int, world_size: int, folder: str) -> int:
    """How many cases this rank saw, each equal to every other rank's."""
    import torch.distributed as dist

    comm = join_group(rank, world_size, folder, "cuda")
    results = comm.all_gather_plain([list(case) for case in test_execute.reduce_all(comm)])
    assert all(result == results[0] for result in results), "ranks differ in their bits"
    dist.destroy_process_group()
    return len(results[0])


if __name__ == "__main__":
    import torch

    most = int(sys.argv[1]) if len(sys.argv) > 1 else torch.cuda.device_count()
    for size in range(2, most + 1):
        print(f"{size} ranks over NCCL: {run_ranks(judged, size)} cases right, the same bits on every rank", flush=True)
