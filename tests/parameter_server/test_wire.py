"""Messages: what goes in comes out, what is no message is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_plugins.parameter_server.layout import Layout
from drivetrain_plugins.parameter_server.wire import DTYPES, Message, WireError, decode, encode


@pytest.mark.parametrize("dtype", list(DTYPES.values()))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_there_and_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(1 if not shape else torch.Size(shape).numel()).reshape(shape).to(dtype)
    found = decode([bytes(frame) for frame in encode(Message("push", {"clock": 3}, [tensor]))])
    assert (found.kind, found.fields) == ("push", {"clock": 3})
    assert torch.equal(found.tensors[0], tensor)
    assert found.tensors[0].dtype == dtype


def test_strides_do_not_matter() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    assert torch.equal(decode([bytes(f) for f in encode(Message("x", {}, [tensor]))]).tensors[0], tensor)


def header(**changes: Any) -> bytes:
    return json.dumps({"kind": "push", "fields": {}, "tensors": [["float32", [2]]], **changes}).encode()


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"\x80\x04]"],
        [b"[1]"],
        [header()],
        [header(), b"1234"],
        [header(), b"12345678", b""],
        [header(kind=3), b"12345678"],
        [header(fields=[]), b"12345678"],
        [header(tensors=[["float99", [2]]]), b"12345678"],
        [header(tensors=[["float32", [-2]]]), b"12345678"],
        [header(tensors=[["float32", [True]]]), b"1234"],
        [header(tensors=[["float32", [2**62, 2**62]]]), b"12345678"],
        [header(tensors=["float32"]), b"12345678"],
        [header(tensors=[["float32", [0, 2**70]]]), b""],
        [header(tensors=[["float32", [0, 2**62, 2**62]]]), b""],
        [header(tensors=[["float32", [0] * 65]]), b""],
        [b"[" * 100_000],
    ],
)
def test_what_is_no_message_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_noise_is_refused_and_nothing_worse(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


def test_a_layout_flattens_and_splits() -> None:
    tensors = {"b": torch.ones(2, 3), "a": torch.tensor(2.0), "c": torch.ones(2, dtype=torch.float64)}
    layout = Layout.of(tensors)
    flats = layout.flatten({**tensors, "b": None})
    assert [(flat.dtype, flat.numel()) for flat in flats] == [(torch.float32, 7), (torch.float64, 2)]
    assert layout.fits(flats)
    assert not layout.fits(flats[::-1])
    views = layout.split(flats)
    assert torch.equal(views["b"], torch.zeros(2, 3))
    assert torch.equal(views["a"], tensors["a"])
