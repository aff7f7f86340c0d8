"""The store through which a job meets: its connections notice when nothing comes through any more."""

from __future__ import annotations

import os
import socket

import pytest

from drivetrain.launch import stores


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
