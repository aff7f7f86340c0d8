"""What a process is told about its place: in no job, in a launcher's, in drivetrain's own."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import pytest
import torch.distributed as dist

from drivetrain import get_distributed_info
from drivetrain.errors import ConfigurationError
from drivetrain.launch import Job, destroy_process_group, init_process_group, launch
from tests.distributed import run_ranks


def test_in_no_job() -> None:
    told = get_distributed_info()
    assert json.loads(json.dumps(told)) == told
    assert told | {"host": "", "pid": 0} == {
        "rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "node": 0, "num_nodes": 1, "host": "",
        "launcher": "none", "initialized": False, "backend": "gloo", "device": "cpu", "master_addr": "127.0.0.1",
        "master_port": 0, "pid": 0,
    }  # fmt: skip
    assert (told["host"], told["pid"]) == (socket.gethostname(), os.getpid())


def test_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "GROUP_RANK": 1, "GROUP_WORLD_SIZE": 2}
    for name, value in {**given, "MASTER_ADDR": "first", "MASTER_PORT": 1234}.items():
        monkeypatch.setenv(name, str(value))
    told = get_distributed_info()
    assert (told["rank"], told["world_size"], told["local_rank"], told["local_world_size"]) == (5, 8, 1, 4)
    assert (told["node"], told["num_nodes"], told["launcher"]) == (1, 2, "torchrun")
    assert (told["master_addr"], told["master_port"]) == ("first", 1234)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigurationError, match="WORLD_SIZE='many'"):
        get_distributed_info()


def _tell(job: Job, payload: dict[str, Any]) -> list[Any]:
    before = get_distributed_info()
    init_process_group(job)
    after = get_distributed_info()
    dist.barrier()  # nobody leaves while another still connects
    destroy_process_group()
    return [before["initialized"], after["initialized"], after["rank"], after["launcher"], after["backend"]]


def test_in_a_worker_of_ours() -> None:
    assert launch(_tell, {}, workers=2) == {rank: [False, True, rank, "local", "gloo"] for rank in (0, 1)}


def test_in_a_process_group_that_somebody_else_made() -> None:
    def tell(rank: int, world_size: int) -> list[Any]:
        told = get_distributed_info()
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # no backend is named
        unnamed = get_distributed_info()
        place = [told["rank"], told["world_size"], told["initialized"], told["launcher"], told["backend"]]
        return [*place, unnamed["backend"], unnamed["world_size"]]

    assert run_ranks(tell, 2) == [[rank, 2, True, "none", "gloo", "gloo", 1] for rank in (0, 1)]
