"""Two nodes on one machine: two launchers that know of each other by address and port only."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.errors import ConfigurationError
from drivetrain.launch import Job, destroy_process_group, init_process_group, launch, stores
from drivetrain.launch.nodes import FixedNodes
from drivetrain.launch.temporary import remove_stale
from tests.distributed import run_alone
from tests.launch import programs
from tests.patience import LIMIT, SOON
from tests.ports import free_port


def _add(job: Job, payload: dict[str, Any]) -> list[Any]:
    init_process_group(job)
    value = torch.tensor([float(job.rank)])
    dist.all_reduce(value)
    if payload.get("fail_until", 0) > job.attempt and job.rank == 2:
        raise ValueError(f"attempt {job.attempt}")
    if payload.get("asleep") and job.rank != 2:
        while True:
            time.sleep(0.1)
    dist.barrier()
    destroy_process_group()
    if job.node_rank == payload.get("slow"):
        time.sleep(1.0)
    return [value.item(), job.rank, job.local_rank, job.node_rank, job.num_nodes, job.world_size, job.attempt]


def _node(folder: Path, node_rank: int, port: int, payload: dict[str, Any], restarts: int = 0) -> None:
    workers = 2 if node_rank == 0 else 1
    values = launch(_add, payload, workers=workers, num_nodes=2, node_rank=node_rank, master_port=port,
                    max_restarts=restarts, start_timeout=LIMIT)  # fmt: skip
    (folder / f"values_{node_rank}").write_text(repr(values))


@pytest.mark.parametrize("slow", [0, 1])
def test_two_nodes_of_unequal_size(slow: int, tmp_path: Path) -> None:
    port = free_port()
    with programs.forked(_node, tmp_path, 1, port, {"slow": slow}) as second:
        time.sleep(0.3)  # the second is there before the first
        with programs.forked(_node, tmp_path, 0, port, {"slow": slow}) as first:
            first.join(LIMIT)
            second.join(LIMIT)
            assert (first.exitcode, second.exitcode) == (0, 0)
    assert (tmp_path / "values_0").read_text() == "{0: [3.0, 0, 0, 0, 2, 3, 0], 1: [3.0, 1, 1, 0, 2, 3, 0]}"
    assert (tmp_path / "values_1").read_text() == "{2: [3.0, 2, 0, 1, 2, 3, 0]}"


def joined_after_another_job() -> bool:
    """Whether a node that has left a job and comes for the next one finds that, where the first node takes longer."""
    port = free_port()
    held = [stores.host(port, loopback=True, timeout=LIMIT)]
    held[0].set("left_1", "1")

    def next_job() -> None:
        held.clear()
        held.append(stores.host(port, loopback=True, timeout=LIMIT))
        held[0].set("next", "1")

    timer = threading.Timer(0.3, next_job)
    timer.start()
    node = FixedNodes(1, 2, stores.LOOPBACK, port, start_timeout=SOON, timeout=LIMIT, tick=lambda: None)
    store = node._open()
    timer.join()
    return bool(store.check(["next"]))


def test_a_scripts_next_stage_does_not_meet_in_the_store_of_the_last_one() -> None:
    """Where it did the first node waited for it in vain: a fit and a test on two nodes came to an end now and then."""
    assert run_alone(joined_after_another_job)


def test_restart_on_both_nodes(tmp_path: Path) -> None:
    port = free_port()
    payload = {"fail_until": 1}
    with (
        programs.forked(_node, tmp_path, 0, port, payload, 1) as first,
        programs.forked(_node, tmp_path, 1, port, payload, 1) as second,
    ):
        first.join(LIMIT)
        second.join(LIMIT)
        assert (first.exitcode, second.exitcode) == (0, 0)
    assert (tmp_path / "values_1").read_text() == "{2: [3.0, 2, 0, 1, 2, 3, 1]}"


@pytest.mark.parametrize("asleep", [False, True])
def test_failure_on_one_node_ends_the_other_and_is_told(
    asleep: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    payload = {"fail_until": 9, "asleep": asleep}
    start = time.monotonic()
    with (
        programs.forked(_node, tmp_path, 0, port, payload) as first,
        programs.forked(_node, tmp_path, 1, port, payload) as second,
    ):
        first.join(SOON)
        second.join(SOON)
        assert (first.exitcode, second.exitcode) == (1, 1)
    assert time.monotonic() - start < 2 * SOON
    assert capfd.readouterr().out.count("rank 2 failed: ValueError: attempt 0\n") == 2


def test_death_of_the_first_launcher_ends_the_second(tmp_path: Path) -> None:
    port = free_port()
    payload = {"fail_until": 0, "asleep": True}
    with (
        programs.forked(_node, tmp_path, 0, port, payload) as first,
        programs.forked(_node, tmp_path, 1, port, payload) as second,
    ):
        assert first.pid is not None
        assert second.pid is not None
        deadline = time.monotonic() + LIMIT
        while len(programs.descendants(first.pid)) < 2 or len(programs.descendants(second.pid)) < 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(first.pid, signal.SIGKILL)
        second.join(SOON)
        assert second.exitcode == 1
    remove_stale()  # a killed launcher cannot clear its folder; the next start does


def test_absent_nodes_are_named() -> None:
    port = free_port()
    with pytest.raises(ConfigurationError) as alone:
        launch(_add, {}, workers=1, num_nodes=2, node_rank=0, master_port=port, start_timeout=0.5)
    assert f"waited 0.5 s at 127.0.0.1:{port} for node 1 of 2" in str(alone.value)
    with pytest.raises(ConfigurationError) as early:
        launch(_add, {}, workers=1, num_nodes=2, node_rank=1, master_port=port, start_timeout=0.5)
    assert f"node 1 could not reach 127.0.0.1:{port} within 0.5 s" in str(early.value)


def test_a_stranger_on_the_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(ConfigurationError, match="no store of this job"):
            launch(_add, {}, workers=1, num_nodes=2, node_rank=1, master_port=port, start_timeout=1.0)
        assert time.monotonic() - start < SOON
