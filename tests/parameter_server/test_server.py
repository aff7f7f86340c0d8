"""One server and its clients in one process: duplicates, staleness, strangers, keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from drivetrain_plugins.parameter_server.wire import Message, decode


@contextmanager
def served(
    workers: int, mode: str, max_staleness: int | None = None, keys: list[Keys] | None = None
) -> Iterator[tuple[Server, list[Client]]]:
    """A running server of one parameter (2.0, stepped by SGD with lr 1) and a client for each worker."""
    own = Keys.new() if keys else None
    listener = Listener("127.0.0.1", own, {pair.public for pair in keys} if keys else None)
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    server = Server(listener, {"w": parameter}, optimizer, workers, mode, max_staleness)
    thread = threading.Thread(target=server.run)
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
        thread.join(5)
        server.stopping = True
        thread.join(5)
        for end in (*clients, listener):
            end.close()
    assert not thread.is_alive()


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
        (lambda: push(1, 0.5, weight="heavy"), "the field 'weight' of a push message is no number"),
        (lambda: Message("pull", {"clock": "noon"}), "no whole number 'clock'"),
        (lambda: apply(groups=[3]), "a parameter group of a message has no settings"),
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
            assert socket.poll(3000)
            assert decode(socket.recv_multipart()).kind == "refused"
        socket.close()
        context.term()
    assert server.refused == 2


def test_an_answer_that_does_not_come() -> None:
    with served(2, "sync") as (_, [client, _]):
        client.timeout = 0.3
        client.send(0, push(1, 0.5))
        client.send(0, apply())  # waits for the other worker
        with pytest.raises(TrainingError, match=r"parameter server 0 did not answer worker 0 within 0.3 s"):
            client.receive(0, "weights")


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
