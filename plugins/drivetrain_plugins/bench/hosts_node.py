"""One host of the benchmark of hosts: starts its ranks, which meet those of the other host, and measures."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.comm.communicator import Communicator
from drivetrain.launch import Job, destroy_process_group, init_process_group, launch
from drivetrain_plugins.bench.hosts import PORT
from drivetrain_plugins.bench.namespaces import sent_bytes

Found = dict[str, dict[str, Any]]


def all_reduces(job: Job, payload: dict[str, Any]) -> Found:
    """Run by each rank: for each algorithm ``seconds`` of each repeat and bytes ``sent`` by each host in one.

    Raises:
        RuntimeError: a sum is wrong.
    """
    init_process_group(job)
    comm = Communicator(dist.group.WORLD)
    ranks: int = payload["ranks"]
    # By name, as users ask for them: the communicator is to find the hosts itself.
    operations = {name: partial(comm.all_reduce, algorithm=name) for name in payload["algorithms"]}
    tensor = torch.empty(payload["numel"])
    found: Found = {name: {"seconds": [], "sent": []} for name in operations}
    for operation in operations.values():
        operation(torch.ones(comm.world_size))  # what comes first is not like the rest
    for _ in range(payload["repeats"]):
        for name, operation in operations.items():
            tensor.fill_(comm.rank + 1.0)
            before = _counted(comm)
            began = time.perf_counter()
            operation(tensor)
            took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            comm.all_reduce(took, "max")
            after = _counted(comm)
            if tensor[0].item() != tensor[-1].item() or tensor[0].item() != sum(range(comm.world_size + 1)):
                raise RuntimeError(f"{name} gave {tensor[0].item()} and {tensor[-1].item()} on rank {comm.rank}")
            found[name]["seconds"].append(took.item())
            found[name]["sent"] = [after[host * ranks] - before[host * ranks] for host in (0, 1)]
    destroy_process_group()
    return found


def _counted(comm: Communicator) -> list[int]:
    """What the link of each rank's host has carried, once all ranks are here; the ranks go on together."""
    comm.barrier()
    counted = comm.all_gather_plain(sent_bytes(Path("/proc/net/dev").read_text(encoding="ascii")))
    comm.barrier()
    return [int(count) for count in counted]


def main() -> int:
    """The program; the request is its only word. The first host prints what was found."""
    request = json.loads(sys.argv[1])
    values = launch(
        all_reduces,
        request,
        workers=request["ranks"],
        num_nodes=2,
        node_rank=request["node"],
        master_addr=request["address"],
        master_port=PORT,
    )
    if request["node"] == 0:
        print(json.dumps(values[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
