"""The store through which a job meets: its connections notice when nothing comes through any more."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest

from drivetrain.errors import ConfigurationError, Interrupted
from drivetrain.launch import Job, handling, init_process_group, stores
from tests.distributed import run_alone
from tests.ports import free_port


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has it")
def test_a_joined_store_has_limited_patience() -> None:
    hosted = stores.host(0, loopback=True, timeout=5)
    before = stores._descriptors()
    joined = stores.join("127.0.0.1", hosted.port, who="rank 1", wait=5, timeout=7)
    patience = []

    def note(connection: socket.socket) -> None:
        patience.append(
            [
                connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
            ]
        )

    stores._each_connection(hosted.port, stores._descriptors() - before, note)
    assert patience == [[7000, 1, 3]]
    joined.set("still", "works")
    assert hosted.get("still") == b"works"


def test_open_descriptors_do_not_hold_that_of_their_own_listing() -> None:
    before = stores._descriptors()
    with open(os.devnull) as file:  # gets the number that the listing had
        assert stores._descriptors() - before == {file.fileno()}


def alone_of_two() -> str:
    """What a rank is told whose fellow never makes a Trainer."""
    job = Job(rank=0, world_size=2, local_world_size=2, master_port=free_port(), origin="mpi", timeout=1.0)
    with pytest.raises(ConfigurationError) as told:
        init_process_group(job)
    return str(told.value)


def test_who_waits_for_a_group_is_told_who_did_not_come() -> None:
    assert "rank 1 did not come within 1 s" in run_alone(alone_of_two)


def stopped_while_alone() -> float:
    """Seconds after which a rank whose fellow has failed ends, which whoever started both asks it to."""
    job = Job(rank=0, world_size=2, local_world_size=2, master_port=free_port(), origin="mpi", timeout=60.0)
    began = time.monotonic()
    with handling():
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Interrupted):
            init_process_group(job)
    return time.monotonic() - began


def test_who_waits_for_a_group_hears_that_it_is_to_stop() -> None:
    assert run_alone(stopped_while_alone) < 20.0
