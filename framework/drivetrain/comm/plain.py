"""Plain data between ranks: what JSON can hold, tensors and arrays in it. Never a pickle: nothing that arrives is run.

A message is ``8 bytes: length of the text | text (JSON) | raw numbers``. In the text a container or a tensor is an
object with one key, so no data of a user's can be taken for one; everything else stands for itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from drivetrain.comm.arguments import is_whole
from drivetrain.comm.buffers import tensor_of
from drivetrain.comm.failures import CommunicationError, Unsendable
from drivetrain.comm.point_to_point import FIRST_OWN_TAG, OBJECT_TAGS, exchange

if TYPE_CHECKING:
    from drivetrain.comm.communicator import Communicator

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
        torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
        torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip
_LENGTH = 8
# Of lists in lists: whoever encodes has as much of Python's stack left as whoever decodes, wherever both are called.
DEEPEST = 100


# -- the format -----------------------------------------------------------------------------------------------------
def encode(data: Any) -> bytes:
    """``data`` as bytes: None, bool, int, float, str, tensors, numpy arrays and numbers, in lists, tuples and dicts
    (keys are None, bool, int, float or str).

    Raises:
        TypeError: something else is in it; says what and where.
    """
    raw: list[bytes] = []
    text = json.dumps(_described(data, raw, "data", DEEPEST)).encode()
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *raw])


def _described(data: Any, raw: list[bytes], where: str, deeper: int) -> Any:
    if isinstance(data, np.generic) and not isinstance(data.item(), np.generic):
        data = data.item()
    if type(data) in (type(None), bool, int, float, str):
        return data
    if isinstance(data, list | tuple | dict) and not deeper:
        raise TypeError(f"{where.partition('[')[0]} is nested more than {DEEPEST} deep, or holds itself")
    if isinstance(data, list | tuple):
        kind = "list" if isinstance(data, list) else "tuple"
        return {kind: [_described(each, raw, f"{where}[{place}]", deeper - 1) for place, each in enumerate(data)]}
    if isinstance(data, dict):
        for key in data:
            if type(key) not in (type(None), bool, int, float, str):
                _refuse(key, f"a key of {where}")
        items = data.items()
        return {"dict": [[key, _described(value, raw, f"{where}[{key!r}]", deeper - 1)] for key, value in items]}
    if isinstance(data, torch.Tensor | np.ndarray):
        try:
            tensor = tensor_of(data)
        except Unsendable as error:
            raise TypeError(f"{where}: {error}") from error
        tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _DTYPES:
            _refuse(data, where)
        raw.append(tensor.view(-1).view(torch.uint8).numpy().tobytes())
        return {"array" if isinstance(data, np.ndarray) else "tensor": [name, *tensor.shape]}
    return _refuse(data, where)


def _refuse(data: Any, where: str) -> Any:
    raise TypeError(f"{where} is a {type(data).__name__}")


def decode(message: bytes | bytearray | memoryview) -> Any:
    """What :meth:`encode` was given; tensors are new and on the CPU.

    Raises:
        CommunicationError: ``message`` is not of this format.
    """
    view = memoryview(message)
    try:
        length = int.from_bytes(view[:_LENGTH], "little")
        if len(view) < _LENGTH or length > len(view) - _LENGTH:
            raise ValueError(f"{len(view)} bytes for a text of {length}")
        described = json.loads(bytes(view[_LENGTH : _LENGTH + length]))
        data, rest = _restored(described, view[_LENGTH + length :])
        if len(rest):
            raise ValueError(f"{len(rest)} bytes too many")
    except (ValueError, KeyError, TypeError, RuntimeError) as error:  # of runtime: torch's, of a shape, and recursion
        raise CommunicationError(
            f"what arrived is not plain data ({error}): both sides must call the object operations."
        ) from error
    return data


def _restored(described: Any, raw: memoryview) -> tuple[Any, memoryview]:
    if not isinstance(described, dict):
        if isinstance(described, list):
            raise ValueError("a bare list")
        return described, raw
    ((kind, content),) = described.items()
    if not isinstance(content, list):
        raise ValueError(f"a {kind} of no list")
    if kind in ("list", "tuple"):
        items = []
        for each in content:
            item, raw = _restored(each, raw)
            items.append(item)
        return (items if kind == "list" else tuple(items)), raw
    if kind == "dict":
        found = {}
        for key, each in content:
            found[key], raw = _restored(each, raw)
        return found, raw
    if kind not in ("tensor", "array"):
        raise ValueError(f"an unknown kind {kind!r}")
    name, *shape = content
    dtype = _DTYPES[name]
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"a shape {shape}")
    size = math.prod(shape) * dtype.itemsize
    if size > len(raw):
        raise ValueError(f"{len(raw)} bytes for a tensor of {size}")
    flat = torch.empty(size, dtype=torch.uint8)
    if size:
        flat.numpy()[:] = np.frombuffer(raw[:size], np.uint8)
    tensor = flat.view(dtype).view(shape)
    return (tensor.numpy() if kind == "array" else tensor), raw[size:]


def _json(data: Any) -> bytes:
    return json.dumps(data).encode()


def _from_json(message: bytes) -> Any:
    try:
        return json.loads(message)
    except (ValueError, RecursionError) as error:  # of ranks that do not do the same, or after an interruption
        raise CommunicationError(f"what arrived is not plain data ({error}): do the same on all ranks.") from error


# -- between two ranks ----------------------------------------------------------------------------------------------
def send_object(comm: Communicator, data: Any, destination: int, tag: int) -> None:
    """See :meth:`drivetrain.comm.Communicator.send_object`."""
    comm.peer_group(destination)
    message = _encoded(comm, data, encode)
    started = comm.statistics.start()
    length = torch.tensor([len(message)], dtype=torch.int64, device=comm.device)
    first, second = _tags(comm, tag)
    exchange(comm, [(destination, length)], [], first, everyone=False)
    exchange(comm, [(destination, _bytes(comm, message))], [], second, everyone=False)
    comm.statistics.finish("object", started, len(message) + 8, 2, len(message) + 8)


def recv_object(comm: Communicator, source: int | None, tag: int) -> Any:
    """See :meth:`drivetrain.comm.Communicator.recv_object`."""
    started = comm.statistics.start()
    length = torch.zeros(1, dtype=torch.int64, device=comm.device)
    first, second = _tags(comm, tag)
    if source is None:
        source = comm.arrivals.take(first, length)
    else:
        comm.peer_group(source)
        if not comm.arrivals.take_from(source, first, length):
            exchange(comm, [], [(source, length)], first, everyone=False)
    message = torch.empty(int(length), dtype=torch.uint8, device=comm.device)
    exchange(comm, [], [(source, message)], second, everyone=False)
    comm.last_source = source
    comm.statistics.finish("object", started, 0, 0, int(length) + 8)
    return decode(message.cpu().numpy().tobytes())


def _tags(comm: Communicator, tag: int) -> tuple[int, int]:
    """The tags of the two messages of an object under a user's tag."""
    if not is_whole(tag) or not 0 <= tag < 2**27:
        raise CommunicationError(f"tag {tag!r} of an object on rank {comm.rank} is out of range: use 0 to {2**27 - 1}.")
    return OBJECT_TAGS + 2 * tag, OBJECT_TAGS + 2 * tag + 1


assert FIRST_OWN_TAG < OBJECT_TAGS and OBJECT_TAGS + 2**28 < 2**30


# -- between all ranks ----------------------------------------------------------------------------------------------
def gather_json(comm: Communicator, data: Any, destination: int | None) -> list[Any]:
    """What JSON holds of all ranks, on ``destination`` or everywhere; elsewhere an empty list."""
    return _gather(comm, data, destination, _json, _from_json, "plain")


def gather_objects(comm: Communicator, data: Any, destination: int | None) -> list[Any]:
    """The plain data of all ranks, on ``destination`` or everywhere; elsewhere an empty list."""
    return _gather(comm, data, destination, encode, decode, "object")


def _gather(
    comm: Communicator,
    data: Any,
    destination: int | None,
    encoder: Callable[[Any], bytes],
    decoder: Callable[[bytes], Any],
    operation: str,
) -> list[Any]:
    if destination is not None:
        comm.require_rank(destination)
    started = comm.statistics.start()
    encoded, problem = _attempt(data, encoder)
    # A rank that cannot encode tells the others, which would wait for it otherwise.
    sizes = _sizes(comm, -1 if problem else len(encoded))
    refused = [rank for rank, size in enumerate(sizes) if size < 0]
    if refused:
        raise _not_plain(comm, refused, problem)
    if comm.group is None:
        return [decoder(encoded)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    padded = padded.to(comm.device)
    receives = destination is None or comm.rank == destination
    parts = [torch.empty_like(padded) for _ in sizes] if receives else None
    if destination is None:
        dist.all_gather(parts, padded, group=comm.group)
        copies = comm.world_size - 1
    else:
        dist.gather(padded, parts, group=comm.group, group_dst=destination)
        copies = 0 if receives else 1
    sent = copies * padded.nbytes + 8 * (comm.world_size - 1)
    comm.statistics.finish(operation, started, sent, copies + comm.world_size - 1, padded.nbytes)
    rows = zip(parts or (), sizes, strict=False)
    return [decoder(part[:size].cpu().numpy().tobytes()) for part, size in rows]


def _sizes(comm: Communicator, size: int) -> list[int]:
    """The sizes of all ranks' messages; not by the communicator's own operation, which may begin with a message."""
    if comm.group is None:
        return [size]
    mine = torch.tensor([size], dtype=torch.int64, device=comm.device)
    sizes = [torch.empty_like(mine) for _ in range(comm.world_size)]
    dist.all_gather(sizes, mine, group=comm.group)
    return [int(each) for each in torch.cat(sizes).tolist()]


def broadcast_object(comm: Communicator, data: Any, source: int) -> Any:
    """See :meth:`drivetrain.comm.Communicator.broadcast_object`."""
    comm.require_rank(source)
    started = comm.statistics.start()
    encoded, problem = _attempt(data, encode) if comm.rank == source else (b"", None)
    length = torch.tensor([-1 if problem else len(encoded)], dtype=torch.int64, device=comm.device)
    if comm.group is not None:
        dist.broadcast(length, group=comm.group, group_src=source)
    if int(length) < 0:
        raise _not_plain(comm, [source], problem)
    if comm.group is None:
        return decode(encoded)
    root = comm.rank == source
    message = _bytes(comm, encoded) if root else torch.empty(int(length), dtype=torch.uint8, device=comm.device)
    dist.broadcast(message, group=comm.group, group_src=source)
    sent = message.nbytes + 8
    comm.statistics.finish("object", started, sent if root else 0, 2 if root else 0, sent)
    return decode(message.cpu().numpy().tobytes())


def scatter_objects(comm: Communicator, parts: Any, source: int) -> Any:
    """See :meth:`drivetrain.comm.Communicator.scatter_object`."""
    comm.require_rank(source)
    root = comm.rank == source
    started = comm.statistics.start()
    messages: list[bytes] = []
    problem: Exception | None = None
    if root:
        if not isinstance(parts, list | tuple) or len(parts) != comm.world_size:
            problem = TypeError(f"it must be a list of {comm.world_size} parts, one for each rank")
        else:
            attempts = [_attempt(part, encode) for part in parts]
            messages = [encoded for encoded, _ in attempts]
            problem = next((error for _, error in attempts if error is not None), None)
    sizes = torch.full((comm.world_size,), -1, dtype=torch.int64)
    if root and problem is None:
        sizes = torch.tensor([len(message) for message in messages], dtype=torch.int64)
    sizes = sizes.to(comm.device)
    if comm.group is not None:
        dist.broadcast(sizes, group=comm.group, group_src=source)
    if int(sizes[0]) < 0:
        raise _not_plain(comm, [source], problem)
    if root:
        others = [rank for rank in range(comm.world_size) if rank != source]
        exchange(comm, [(rank, _bytes(comm, messages[rank])) for rank in others], [])
        sent = sum(len(messages[rank]) for rank in others)
        comm.statistics.finish("object", started, sent, len(others), sent + len(messages[source]))
        return decode(messages[source])
    message = torch.empty(int(sizes[comm.rank]), dtype=torch.uint8, device=comm.device)
    exchange(comm, [], [(source, message)])
    comm.statistics.finish("object", started, 0, 0, message.nbytes)
    return decode(message.cpu().numpy().tobytes())


def _bytes(comm: Communicator, message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8).to(comm.device)


def _attempt(data: Any, encoder: Callable[[Any], bytes]) -> tuple[bytes, Exception | None]:
    try:
        return encoder(data), None
    except (TypeError, ValueError, RecursionError) as error:
        return b"", error


def _encoded(comm: Communicator, data: Any, encoder: Callable[[Any], bytes]) -> bytes:
    encoded, problem = _attempt(data, encoder)
    if problem is not None:
        raise _not_plain(comm, [comm.rank], problem)
    return encoded


def _not_plain(comm: Communicator, ranks: list[int], problem: Exception | None) -> CommunicationError:
    error = CommunicationError(
        f"the data of rank {', '.join(map(str, ranks))} in group {comm.label!r} is not plain"
        f"{f' ({problem})' if problem else ''}: send only what JSON can hold"
        ", and in the object operations tensors and numpy arrays."
    )
    error.__cause__ = problem
    return error
