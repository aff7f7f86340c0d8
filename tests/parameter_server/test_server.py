"""One server and its clients in one process: duplicates, staleness, strangers, keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, which sets a variable and makes a folder
import zmq
from torch import nn

from drivetrain.errors import TrainingError
from drivetrain_plugins.parameter_server.client import Client
from drivetrain_plugins.parameter_server.endpoint import Keys, Listener
from drivetrain_plugins.parameter_server.server import Server
from drivetrain_plugins.parameter_server.window import Window
from drivetrain_plugins.parameter_server.wire import HEADER_LIMIT, Message, decode, encode
from tests.patience import LIMIT, SOON


@contextmanager
def served(
    workers: int,
    mode: str,
    max_staleness: int | None = None,
    keys: list[Keys] | None = None,
    window: Window | None = None,
) -> Iterator[tuple[Server, list[Client]]]:
    """A running server of one parameter (2.0, stepped by SGD with lr 1) and a client for each worker."""
    own = Keys.new() if keys else None
    listener = Listener("127.0.0.1", own, {pair.public for pair in keys} if keys else None)
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    server = Server(listener, {"w": parameter}, optimizer, workers, mode, max_staleness, window=window)
    thread = threading.Thread(target=_quietly, args=(server,))
    thread.start()
    clients = [
        Client([listener.address], rank, 3.0, keys[rank] if keys else None, [own.public] if own else None)
        for rank in range(workers)
    ]
    try:
        yield server, clients
    finally:
        for client in clients:
            client.goodbye()
        thread.join(LIMIT)
        server.stopping = True
        thread.join(LIMIT)
        for end in (*clients, listener):
            end.close()
    assert not thread.is_alive()


def _quietly(server: Server) -> None:
    """What ends it is in ``server.failure``."""
    with suppress(TrainingError):
        server.run()


def push(clock: int, gradient: float, version: int = 0, **more: Any) -> Message:
    fields = {"clock": clock, "present": [True], "contributed": True, "weight": 0.0, "version": version, **more}
    return Message("push", {"groups": [{"lr": 1.0}], **fields}, [torch.tensor([gradient])])


def apply(clock: int = 1, **more: Any) -> Message:
    return Message("apply", {"clock": clock, "groups": [{"lr": 1.0}], "factor": None, "bound": None, **more})


def test_a_push_that_comes_twice_counts_once() -> None:
    with served(1, "sync") as (server, [client]):
        for _ in range(2):
            client.send(0, push(1, 0.5))
        client.send(0, apply())
        assert client.receive(0, "weights").tensors[0].tolist() == [1.5]
        client.send(0, push(1, 0.5))
        client.send(0, Message("pull"))
        assert client.receive(0, "weights").tensors[0].tolist() == [1.5]
    assert server.version == 1


def test_an_apply_that_comes_twice_steps_once() -> None:
    with served(1, "sync") as (server, [client]):
        client.send(0, push(1, 0.5))
        client.send(0, apply(1))
        client.receive(0, "weights")
        client.send(0, apply(1))
        client.send(0, push(2, 0.5))
        client.send(0, Message("norm"))  # answered before the second step, unless the old word led to it
        client.receive(0, "norm")
        assert server.version == 1
        client.send(0, apply(2))
        assert client.receive(0, "weights").tensors[0].tolist() == [1.0]


def test_a_step_that_the_workers_skip_leaves_all_as_it_was() -> None:
    with served(1, "sync") as (server, [client]):
        client.send(0, push(1, 0.5))
        client.send(0, apply(1, skip=True))
        answer = client.receive(0, "weights")
        assert (answer.tensors[0].tolist(), answer.fields["stepped"]) == ([2.0], False)
    assert server.version == 0


def test_async_steps_at_once_and_counts_staleness() -> None:
    with served(2, "async") as (server, [a, b]):
        a.send(0, push(1, 0.5, version=0))
        assert a.receive(0, "weights").fields["version"] == 1
        b.send(0, push(1, 0.25, version=0))  # computed with weights that are one step old by now
        assert b.receive(0, "weights").tensors[0].tolist() == [1.25]
        b.send(0, push(1, 0.25, version=0))  # twice
        assert b.receive(0, "weights").tensors[0].tolist() == [1.25]
    assert server.staleness == [2, 1, 1]


def test_nobody_is_more_clocks_ahead_than_allowed() -> None:
    with served(2, "async", max_staleness=1) as (_, [a, b]):
        a.send(0, push(1, 0.0))
        a.receive(0, "weights")
        a.send(0, push(2, 0.0))
        assert not a.sockets[0].poll(300)
        b.send(0, push(1, 0.0))
        b.receive(0, "weights")
        assert a.receive(0, "weights").fields["version"] == 3
        a.send(0, push(3, 0.0))
        assert not a.sockets[0].poll(300)
        b.goodbye()  # who has finished holds nobody up
        a.receive(0, "weights")


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (lambda: Message("dance"), "there is no message 'dance'"),
        (lambda: push(1, 0.5, present=[]), "does not say which parameters"),
        (lambda: Message("push", {"clock": 1, "present": [True]}, [torch.zeros(3)]), "does not have this server's"),
        (lambda: Message("push", {"present": [True]}, []), "no whole number 'clock'"),
        (lambda: push(7, 0.5), "a push of clock 7 came after that of clock 0"),
        (lambda: push(1, 0.5, weight=10**400), "beyond all bounds"),
        (lambda: push(1, 0.5, weight=float("nan")), "is no amount"),
        (lambda: Message("push", push(1, 0.5).fields, [torch.ones(1, 1)]), "does not have this server's"),
        (lambda: apply(groups=[{"lr": "high"}]), "sets 'lr' of a parameter group to what it cannot be"),
        (lambda: apply(groups=[{"lr": None}]), "sets 'lr'"),
        (lambda: apply(groups=[3]), "has no settings"),
        (lambda: apply(weights=True), "an? apply does not have this server's parameters"),
        (lambda: push(1, 0.5, weight="heavy"), "the field 'weight' of a push message is no number"),
        (lambda: Message("pull", {"clock": "noon"}), "no whole number 'clock'"),
        (lambda: apply(groups=[3]), "a parameter group of a message has no settings"),
        (lambda: Message("load", {}, [torch.zeros(2)]), "a load does not have this server's parameters"),
        (
            lambda: Message("load", {"saved": True, "entries": [["v", "step", [1]]], "kept": None}, [torch.zeros(1)]),
            "a load has no states of this server's parameters",
        ),
        (lambda: apply(groups=[]), "does not have this optimizer's parameter groups"),
    ],
)
def test_what_makes_no_sense_is_refused(message: Callable[[], Message], why: str) -> None:
    with served(1, "sync") as (server, [client]):
        client.send(0, message())
        with pytest.raises(TrainingError, match=why):
            client.receive(0, "weights")
        client.send(0, Message("pull"))  # and the server goes on
        assert client.receive(0, "weights").tensors[0].tolist() == [2.0]
    assert server.refused == 1


def test_a_stranger_is_refused() -> None:
    with served(1, "sync") as (server, _):
        context = zmq.Context()
        socket: Any = context.socket(zmq.DEALER)
        socket.connect(server.listener.address)
        for frames in ([b"\x80\x04K\x01."], [b'{"kind": "done", "fields": {"rank": 0}, "tensors": []}']):
            socket.send_multipart(frames)
            assert socket.poll(1000 * SOON)
            assert decode(socket.recv_multipart()).kind == "refused"
        socket.close()
        context.term()
    assert server.refused == 2


def test_a_frame_that_nothing_could_need_is_cut_off_before_it_is_read() -> None:
    with served(1, "sync") as (server, [client]):
        context = zmq.Context()
        socket: Any = context.socket(zmq.DEALER)
        socket.connect(server.listener.address)
        socket.send_multipart([b"x", bytes(HEADER_LIMIT + 1)])
        assert not socket.poll(300)
        socket.close(0)
        context.term()
        client.send(0, Message("pull"))
        assert client.receive(0, "weights").tensors[0].tolist() == [2.0]
    assert server.refused == 0


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_largest_frame_that_is_needed_gets_through(encrypted: bool) -> None:
    """Encryption makes it larger: a push of more than the header's limit was cut off, as from a worker that is gone."""
    largest = HEADER_LIMIT + 8
    own, key = (Keys.new(), Keys.new()) if encrypted else (None, None)
    listener = Listener("127.0.0.1", own, {key.public} if key else None, largest)
    client = Client([listener.address], 0, 3.0, key, [own.public] if own else None, zero_copy=False)
    try:
        for size, passes in ((largest, True), (largest + 1, False)):
            client.send(0, Message("push", {}, [torch.zeros(size, dtype=torch.uint8)]))
            assert bool(listener.socket.poll(int(LIMIT * 1000) if passes else 300)) == passes
            if passes:
                assert [len(frame) for frame in listener.socket.recv_multipart()][2:] == [size]
    finally:
        client.sockets[0].linger = 0
        client.close()
        listener.close()


def test_an_answer_that_does_not_come() -> None:
    with served(2, "sync") as (_, [client, _]):
        client.timeout = 0.3
        client.send(0, push(1, 0.5))
        client.send(0, apply())  # waits for the other worker
        with pytest.raises(TrainingError, match=r"parameter server 0 did not answer worker 0 within 0.3 s"):
            client.receive(0, "weights")


def test_a_worker_that_leaves_without_a_goodbye_ends_the_others_waiting() -> None:
    with served(3, "sync") as (server, [a, b, c]):
        for client in (a, b, c):
            client.greet()
        a.send(0, push(1, 0.5))
        a.send(0, apply())  # waits for the others
        c.goodbye()
        c.close()
        assert not a.sockets[0].poll(300)
        b.said_goodbye = True  # as if killed
        b.close()
        with pytest.raises(TrainingError, match=r"rank 1 is gone, its connection was closed"):
            a.receive(0, "weights")
    assert "rank 1 is gone" in str(server.failure)


def test_a_server_that_is_gone_is_noticed_at_once() -> None:
    listener = Listener("127.0.0.1")
    client = Client([listener.address], 0, 60.0, ranks=[7])
    client.send(0, Message("pull"))
    who = listener.socket.recv_multipart()[0]
    listener.socket.send_multipart([who, *encode(Message("weights"))])
    client.receive(0, "weights")
    listener.close()
    client.send(0, Message("pull"))
    began = time.monotonic()
    with pytest.raises(TrainingError, match=r"rank 7 \(parameter server 0\) is gone, its connection was closed"):
        client.receive(0, "weights")
    assert time.monotonic() - began < SOON
    client.sockets[0].linger = 0
    client.close()


def test_keys_let_in_the_jobs_workers_only() -> None:
    pair = Keys.new()
    with served(1, "sync", keys=[pair]) as (server, [client]):
        client.send(0, Message("pull"))
        assert client.receive(0, "weights").tensors[0].tolist() == [2.0]
        for keys in (Keys.new(), None):
            public = server.listener.public
            other = Client([server.listener.address], 0, 0.5, keys, [public] if keys else None)
            other.send(0, Message("pull"))
            with pytest.raises(TrainingError, match=r"did not answer|takes no messages"):
                other.receive(0, "weights")
            other.sockets[0].linger = 0
            other.close()
