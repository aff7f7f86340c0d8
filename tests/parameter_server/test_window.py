"""Memory that processes share: found by its handle only, written by its owner only, the same numbers as by messages."""

from __future__ import annotations

import json
import multiprocessing
import os
from typing import Any

import pytest
import torch

from drivetrain.errors import TrainingError
from drivetrain_plugins.parameter_server.client import Client
from drivetrain_plugins.parameter_server.layout import Layout
from drivetrain_plugins.parameter_server.window import Window
from drivetrain_plugins.parameter_server.wire import Message, WireError, decode, encode, size
from tests.parameter_server.test_server import apply, push, served

LAYOUT = Layout.of({"a": torch.zeros(5, dtype=torch.float64), "b": torch.zeros(3), "c": torch.zeros(2, 2)})
ONE = Layout.of({"w": torch.zeros(1)})  # as the server of these tests has it


def made(layout: Layout, workers: int = 2) -> Window:
    window = Window.create(layout, workers)
    assert window is not None
    return window


def _write(handle: str) -> None:
    window = Window.open(handle, LAYOUT, 2)
    assert window is not None
    for number, area in enumerate(window.areas):
        for flat in area:
            flat.fill_(number + 1)
    window.close()


def test_another_process_writes_and_this_one_reads() -> None:
    window = made(LAYOUT)
    before = [[flat.tolist() for flat in area] for area in window.areas]
    writer = multiprocessing.get_context("fork").Process(target=_write, args=(window.handle,))
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    assert before == [[[0.0] * 7, [0.0] * 5]] * 3
    assert [[flat.tolist() for flat in area] for area in window.areas] == [[[n] * 7, [n] * 5] for n in (1.0, 2.0, 3.0)]
    window.close()


def test_what_is_not_that_memory_is_left_alone() -> None:
    window = made(LAYOUT)
    told = json.loads(window.handle)
    assert Window.open("", LAYOUT, 2) is None
    assert Window.open(window.handle, Layout.of({"a": torch.zeros(5000)}), 2) is None
    assert Window.open(window.handle, LAYOUT, 3) is None
    assert Window.open(json.dumps({**told, "nonce": "0" * 32}), LAYOUT, 2) is None
    assert Window.open(json.dumps({**told, "path": "/proc/self/fd/99999"}), LAYOUT, 2) is None
    window.close()
    assert Window.open(window.handle, LAYOUT, 2) is None


def test_none_where_there_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*rest: Any) -> None:
        raise OSError("no space left")

    open_before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert Window.create(LAYOUT, 2) is None
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_message_tells_the_area_only() -> None:
    window = made(LAYOUT)
    message = Message("push", {}, window.areas[1], 1)
    frames = [bytes(frame) for frame in encode(message)]
    assert len(frames) == 1
    assert size(message, frames) == len(frames[0]) + 7 * 4 + 5 * 8
    found = decode(frames, window.areas)
    assert [flat.data_ptr() for flat in found.tensors] == [flat.data_ptr() for flat in window.areas[1]]
    for areas in ((), window.areas[:1]):
        with pytest.raises(WireError, match="memory that is not shared"):
            decode(frames, areas)
    window.close()


def ask(client: Client, *messages: Message) -> Message:
    for message in messages:
        client.send(0, message)
    return client.receive(0, "weights")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_same_weights_with_and_without(mode: str) -> None:
    """One worker shares memory with the server, the other does not; both get what both of the gradients made."""
    window = made(ONE)
    with served(2, mode, window=window) as (server, [a, b]):
        a.windows = [window]
        assert ask(a, Message("pull", {"clock": 0, "shares": True})).area is not None
        assert ask(b, Message("pull", {"clock": 0, "shares": False})).area is None
        window.areas[0][0].fill_(0.5)
        near = push(1, 0.0)
        a.send(0, Message("push", near.fields, window.areas[0], 0))
        b.send(0, push(1, 1.0))
        if mode == "sync":
            a.send(0, apply())
            b.send(0, apply())
        found = [client.receive(0, "weights") for client in (a, b)]
        assert [message.area for message in found] == [2 if mode == "sync" else 0, None]
        expected = 1.25 if mode == "sync" else 0.5
        assert ask(a, Message("pull")).tensors[0].tolist() == ask(b, Message("pull")).tensors[0].tolist() == [expected]
        a.send(0, Message("push", push(2, 0.0).fields, window.areas[1], 1))
        with pytest.raises(TrainingError, match="worker 0 speaks of memory that is not its own"):
            a.receive(0, "weights")
    assert server.refused == 1
    window.close()


def test_gradients_are_seen_where_they_lie() -> None:
    window = made(ONE, 1)
    with served(1, "sync", window=window) as (_, [client]):
        client.windows = [window]
        ask(client, Message("pull", {"clock": 0, "shares": True}))
        window.areas[0][0].fill_(0.5)
        client.send(0, Message("push", push(1, 0.0).fields, window.areas[0], 0))
        client.send(0, Message("gradients"))
        answer = client.receive(0, "gradients")
        assert (answer.area, answer.tensors[0].tolist()) == (0, [0.5])
        client.send(0, Message("norm"))
        assert client.receive(0, "norm").fields["square"] == 0.25
        assert ask(client, apply()).tensors[0].tolist() == [1.5]
    window.close()
