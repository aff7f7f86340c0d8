"""Traffic counted by operation, group and phase; names that load torch only when they are used."""

from __future__ import annotations

import gc
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

from drivetrain.comm import phase
from drivetrain.comm.communicator import Communicator
from drivetrain.comm.statistics import Statistics, bus_factor
from drivetrain.comm.world import join_world
from drivetrain.errors import ConfigurationError
from drivetrain.launch import destroy_process_group
from drivetrain_plugins.bench import profiling
from tests.patience import LIMIT


def test_bandwidths_are_those_of_nccl_tests() -> None:
    for operation, factor in (("all_reduce", 1.5), ("ring", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75),
                              ("all_to_all", 0.75), ("broadcast", 1.0), ("reduce", 1.0), ("send", 1.0)):  # fmt: skip
        assert bus_factor(operation, 4) == factor
        four = Statistics("four", 4)
        four.record(operation, bytes_sent=10, messages=2, seconds=0.5, payload=1000)
        four.record(operation, bytes_sent=30, messages=1, seconds=1.5, payload=3000)
        row = four.stats()["operations"][operation]
        assert row == {
            "calls": 2, "bytes_sent": 40, "messages": 3, "seconds": 2.0,
            "algorithm_bandwidth": 2000.0, "bus_bandwidth": 2000.0 * factor,
        }  # fmt: skip


def test_a_family_is_profiled_and_reported_together() -> None:
    top = Communicator(label="top")
    early = top.split(0, label="early")
    assert early is not None
    with phase.during("forward"):
        early.statistics.record("send", bytes_sent=1, messages=1)
    assert top.stats()["phases"] == {} and top.stats()["bytes_sent"] == 1
    top.enable_profiling()
    late = early.sub([0], "late")
    assert late is not None and late.statistics.profiling and early.statistics.profiling
    with phase.during("backward"):
        late.statistics.record("send", bytes_sent=10, messages=1, seconds=0.5, payload=10)
        thread = threading.Thread(target=top.statistics.record, args=("ring",), kwargs={"bytes_sent": 100})
        thread.start()
        thread.join()
    found = top.stats()
    assert found["bytes_sent"] == 111 and found["operations"]["send"]["bytes_sent"] == 11
    assert {name: row["bytes_sent"] for name, row in found["phases"]["backward"].items()} == {"send": 10, "ring": 100}
    assert {label: row["bytes_sent"] for label, row in found["groups"].items()} == {
        "top": 100,
        "early 0": 1,
        "late": 10,
    }
    assert early.stats()["bytes_sent"] == 11
    top.disable_profiling()
    with phase.during("optimizer"):
        late.statistics.record("send", bytes_sent=1000)
    assert "optimizer" not in top.stats()["phases"] and top.stats()["bytes_sent"] == 1111
    late.statistics.reset()
    del early, late
    gc.collect()
    assert top.stats()["bytes_sent"] == 101


def test_what_a_group_that_is_gone_had_counted_stays() -> None:
    top = Communicator(label="top")
    top.enable_profiling()

    def of(parent: Communicator, label: str, bytes_sent: int) -> Communicator:
        made = parent.sub([0], label)
        assert made is not None
        with phase.during("forward"):
            made.statistics.record("send", bytes_sent=bytes_sent, messages=1, seconds=0.5, payload=bytes_sent)
        return made

    between = of(top, "between", 1)
    below = of(between, "below", 10)
    del between
    gc.collect()
    assert top.stats()["bytes_sent"] == 11
    for _ in range(50):
        of(below, "short", 100)
    gc.collect()
    of(top, "short", 100)
    below.statistics.record("send", bytes_sent=1000)
    for _ in range(2):
        found = top.stats()
        assert {label: row["bytes_sent"] for label, row in found["groups"].items()} == {
            "between": 1,
            "below": 1010,
            "short": 5100,
        }
        assert found["operations"]["send"]["calls"] == 54
        assert found["phases"]["forward"]["send"]["bytes_sent"] == 5111
    assert len(top.statistics.family()) < 6  # what is gone takes no room
    assert below.stats()["bytes_sent"] == 6010
    del below
    gc.collect()
    of(top, "short", 0)
    assert top.stats()["bytes_sent"] == 6111
    top.statistics.reset()
    assert top.stats()["bytes_sent"] == 0
    copied = pickle.loads(pickle.dumps(top.statistics))
    copied.record("send", bytes_sent=3)
    assert copied.stats()["bytes_sent"] == 3


def counted(comm: Communicator) -> dict[str, Any]:
    n = comm.world_size
    comm.enable_profiling()
    tensor = torch.ones(600)
    with phase.during("backward"):
        comm.all_reduce(tensor)
        comm.all_reduce(tensor, algorithm="ring")
    with phase.during("optimizer"):
        comm.all_gather(tensor)
        comm.broadcast(tensor)
        comm.reduce_scatter(tensor)
        comm.all_to_all(tensor)
        comm.gather(tensor)
        comm.scatter(tensor if comm.is_master else None)
    comm.barrier(20)
    found = comm.stats()
    assert all(row["seconds"] > 0 for row in found["operations"].values())
    assert n == 3
    return {name: (row["bytes_sent"], row["messages"]) for name, row in found["operations"].items()} | {
        "phases": sorted(found["phases"]), "optimizer": sorted(found["phases"]["optimizer"])
    }  # fmt: skip


def test_bytes_and_messages_of_each_operation() -> None:
    first, second, third = ranks.run(counted, 3)
    same = {
        "all_reduce": (3200, 4), "ring": (3200, 4), "all_gather": (4800, 2), "reduce_scatter": (1600, 2),
        "all_to_all": (1600, 2), "barrier": (0, 1), "phases": ["backward", "optimizer", "setup"],
        "optimizer": ["all_gather", "all_to_all", "broadcast", "gather", "reduce_scatter", "scatter"],
    }  # fmt: skip
    assert first == same | {"broadcast": (2400, 1), "gather": (0, 0), "scatter": (1600, 2)}
    assert second == third == same | {"broadcast": (0, 0), "gather": (2400, 1), "scatter": (0, 0)}


def test_the_benchmark_of_counting(capsys: pytest.CaptureFixture[str]) -> None:
    assert profiling.main(["--repeats", "1", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["operation_on_ns"] > 0 and row["on_share"] > row["mark_ns"] / 1e9
    with pytest.raises(ConfigurationError, match="must be positive"):
        profiling.main(["--operations", "0"])


def of_the_job(comm: Communicator) -> list[Any]:
    """As a program under torchrun does it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    port = comm.broadcast_object(port)
    rank, size = comm.rank, comm.world_size
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    joined = join_world()
    again = join_world()
    places = joined.by_host()  # the launcher says that each rank is a node
    found = [joined.rank, joined.world_size, joined.all_reduce(torch.tensor(1)).item(), again.rank, places.hosts]
    destroy_process_group()
    return found


def test_the_world_of_a_job_without_a_trainer() -> None:
    assert ranks.run(of_the_job, 2) == [[0, 2, 2, 0, [0, 1]], [1, 2, 2, 1, [0, 1]]]
    assert join_world().world_size == 1


def test_names_load_torch_when_they_are_used() -> None:
    code = (
        "import sys, drivetrain.comm, drivetrain.comm.phase, drivetrain.comm.statistics, drivetrain.comm.failures\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)
    import drivetrain.comm

    assert drivetrain.comm.Communicator is Communicator and "join_world" in dir(drivetrain.comm)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        drivetrain.comm.nothing  # noqa: B018
