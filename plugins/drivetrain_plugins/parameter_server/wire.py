"""Messages between workers and servers: a JSON header, then the bytes of each tensor as they lie in memory; or, where
both ends share memory, the number of the area of it that the tensors lie in.

Nothing is pickled. What comes in is checked against its own header before a byte of it is used: whoever can reach the
port can make a message be refused, and nothing else.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

HEADER_LIMIT = 2**24  # bytes
DIMENSIONS, ELEMENTS = 64, 2**48  # of one tensor
_NAMES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
DTYPES = {name: getattr(torch, name) for name in _NAMES}


class WireError(Exception):
    """A message that is not what its header says, or no message at all."""


@dataclass(frozen=True)
class Message:
    """``kind`` says what is wanted, ``fields`` are plain data, ``tensors`` lie on the CPU: in this ``area`` of shared
    memory, or anywhere where it is None."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    area: int | None = None

    def number(self, name: str) -> int:
        """The whole number ``name`` of the fields."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise WireError(f"a {self.kind} message has no whole number {name!r}")
        return value

    def amount(self, name: str) -> float:
        """The number ``name`` of the fields, 0 or more; 0 where there is none."""
        value = self.fields.get(name)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise WireError(f"the field {name!r} of a {self.kind} message is no number")
        if not 0 <= value < float("inf"):
            raise WireError(f"the field {name!r} of a {self.kind} message is no amount")
        try:
            return float(value)
        except OverflowError as error:
            raise WireError(f"the field {name!r} of a {self.kind} message is beyond all bounds") from error


def encode(message: Message) -> list[Any]:
    """The frames to send; those of tensors are their own memory, which must not change until they are gone."""
    sent = message.tensors if message.area is None else []
    tensors = [tensor.detach().cpu().contiguous() for tensor in sent]
    header = {
        "kind": message.kind,
        "fields": message.fields,
        "area": message.area,
        "tensors": [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors],
    }
    return [json.dumps(header).encode(), *(t.reshape(-1).view(torch.uint8).numpy() for t in tensors)]


def size(message: Message, frames: Sequence[Any]) -> int:
    """Bytes that ``message``, encoded in ``frames``, takes to the other end, shared memory included."""
    shared = 0 if message.area is None else sum(tensor.nbytes for tensor in message.tensors)
    return shared + sum(len(frame) for frame in frames)


def decode(frames: Sequence[Any], areas: Sequence[list[Tensor]] = ()) -> Message:
    """The message in ``frames`` (anything with the buffer protocol), whose tensors may lie in one of ``areas``.

    Raises:
        WireError: the frames are not what :func:`encode` makes.
    """
    if not frames:
        raise WireError("a message has no frames")
    head, *bodies = (memoryview(frame) for frame in frames)
    if head.nbytes > HEADER_LIMIT:
        raise WireError(f"a header has {head.nbytes} bytes, more than {HEADER_LIMIT}")
    try:
        header = json.loads(bytes(head))
    except (ValueError, RecursionError) as error:  # the latter where it is nested without end
        raise WireError(f"a header is not JSON ({error})") from error
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise WireError("a header names no kind of message")
    fields, described = header.get("fields"), header.get("tensors")
    if not isinstance(fields, dict) or not isinstance(described, list) or len(described) != len(bodies):
        raise WireError(f"a {header['kind']} message does not have the parts that its header lists")
    area = header.get("area")
    if area is not None:
        if isinstance(area, bool) or not isinstance(area, int) or not 0 <= area < len(areas) or described:
            raise WireError(f"a {header['kind']} message speaks of memory that is not shared")
        return Message(header["kind"], fields, list(areas[area]), area)
    tensors = [_tensor(kind, body) for kind, body in zip(described, bodies, strict=True)]
    return Message(header["kind"], fields, tensors)


def _tensor(kind: Any, body: memoryview) -> Tensor:
    known = isinstance(kind, list) and len(kind) == 2 and isinstance(kind[0], str) and isinstance(kind[1], list)
    if not known or kind[0] not in DTYPES:
        raise WireError(f"a tensor is described as {str(kind)[:100]}")
    dtype, shape = DTYPES[kind[0]], kind[1]
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in shape):
        raise WireError(f"a tensor has the shape {str(shape)[:100]}")
    # With a size of zero among them the others may be anything and the bytes still match.
    if len(shape) > DIMENSIONS or prod(max(size, 1) for size in shape) > ELEMENTS:
        raise WireError(f"a tensor has the shape {str(shape)[:100]}, which is beyond all bounds")
    wanted = prod(shape) * dtype.itemsize
    if body.nbytes != wanted:
        raise WireError(f"a tensor of {kind[0]} {shape} has {body.nbytes} bytes instead of {wanted}")
    if wanted == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(_own(body), dtype=torch.uint8).view(dtype).reshape(shape)


def _own(body: memoryview) -> Any:
    """Memory with the bytes of ``body`` that a tensor may write to.

    A received frame is nobody else's, though Python sees it as read-only: it is used as it lies. ``bytes`` are copied.
    """
    if not body.readonly:
        return body
    if isinstance(body.obj, bytes):
        return bytearray(body)
    address = np.frombuffer(body, dtype=np.uint8).ctypes.data
    memory = (ctypes.c_ubyte * body.nbytes).from_address(address)
    memory.frame = body  # type: ignore[attr-defined]  # lives as long as the tensor
    return memory
