"""Messages between two ranks, and rounds of messages between many: what the uneven collectives are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from drivetrain.comm.buffers import NATIVE, Flat, as_bytes, require_place, tensor_of
from drivetrain.comm.failures import CommunicationError, lost

if TYPE_CHECKING:
    from drivetrain.comm.communicator import Communicator

# Tags from here on are our own: no message of a user's can be taken for one of these.
FIRST_OWN_TAG = 2**29
HEADER_TAG, PAYLOAD_TAG, ABORT_TAG = FIRST_OWN_TAG, FIRST_OWN_TAG + 1, 2**30
SCHEDULE_TAGS = FIRST_OWN_TAG + 2  # schedules number their messages from here on
OBJECT_TAGS = FIRST_OWN_TAG + 2**20  # a user's tag for an object has two messages from here on

_DTYPES = [
    *sorted(NATIVE, key=str),
    torch.complex64,
    torch.complex128,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
_DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
_DIMENSIONS = 10

Message = tuple[int, torch.Tensor]  # the peer, and a flat contiguous tensor


class Handle(Protocol):
    """An operation under way."""

    def wait(self) -> Any:
        """Return when the operation is complete; raises what the transport raised."""


class Transfer:
    """A message under way. ``wait`` returns what the caller brought, when it may be read or changed again."""

    __slots__ = ("_comm", "_flat", "_into", "_peer", "_work")

    def __init__(self, comm: Communicator, work: dist.Work, peer: int, flat: Flat, into: bool) -> None:
        self._comm, self._work, self._peer, self._flat, self._into = comm, work, peer, flat, into

    def wait(self) -> Any:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise lost(self._comm.rank, self._peer, self._comm.label, error) from error
        return self._flat.land() if self._into else self._flat.value


class Claimed:
    """A message that a receive from any rank, posted earlier, gets. ``wait`` returns what the caller brought."""

    __slots__ = ("_fill", "_flat")

    def __init__(self, fill: Callable[[], None], flat: Flat) -> None:
        self._fill, self._flat = fill, flat

    def wait(self) -> Any:
        self._fill()
        return self._flat.land()


class Several:
    """Messages of a list, each under way by itself."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> list[Any]:
        return [handle.wait() for handle in self._handles]


def isend(comm: Communicator, value: Any, destination: int, tag: int) -> Handle:
    """See :meth:`drivetrain.comm.Communicator.isend`."""
    if isinstance(value, list | tuple):
        return Several([isend(comm, each, destination, tag) for each in value])
    group = comm.peer_group(destination)
    flat = Flat(comm, value)
    work = _posted(comm, destination, group.send, flat.tensor, tag)
    size = flat.tensor.nbytes
    comm.statistics.record("send", bytes_sent=size, messages=1, payload=size)
    return Transfer(comm, work, destination, flat, into=False)


def irecv(comm: Communicator, value: Any, source: int, tag: int) -> Handle:
    """See :meth:`drivetrain.comm.Communicator.irecv`."""
    if isinstance(value, list | tuple):
        return Several([irecv(comm, each, source, tag) for each in value])
    group = comm.peer_group(source)
    require_place(value)
    flat = Flat(comm, value)
    fill = comm.arrivals.claim(source, tag, flat.tensor)
    if fill is not None:
        return Claimed(fill, flat)
    return Transfer(comm, _posted(comm, source, group.recv, flat.tensor, tag), source, flat, into=True)


def _posted(comm: Communicator, peer: int, post: Any, flat: torch.Tensor, tag: int) -> dist.Work:
    """The work of a message that was handed to the transport, which may know already that the peer is gone."""
    try:
        return post([as_bytes(flat)], peer, tag)
    except RuntimeError as error:
        raise lost(comm.rank, peer, comm.label, error) from error


def send(comm: Communicator, value: Any, destination: int, tag: int) -> None:
    """See :meth:`drivetrain.comm.Communicator.send`."""
    if isinstance(value, list | tuple):
        for each in value:
            send(comm, each, destination, tag)
        return
    group = comm.peer_group(destination)
    flat = Flat(comm, value)
    started = comm.statistics.start(flat.tensor)
    Transfer(comm, _posted(comm, destination, group.send, flat.tensor, tag), destination, flat, into=False).wait()
    comm.statistics.finish("send", started, flat.tensor.nbytes, 1, flat.tensor.nbytes)


def recv(comm: Communicator, value: Any, source: int | None, tag: int) -> Any:
    """See :meth:`drivetrain.comm.Communicator.recv`."""
    if isinstance(value, list | tuple):
        # A list comes from one rank: whoever sends its first tensor sends the others.
        taken = []
        for each in value:
            taken.append(recv(comm, each, source, tag))
            source = comm.last_source
        return taken
    if source is not None:
        group = comm.peer_group(source)
    require_place(value)
    if source is not None:
        flat = Flat(comm, value)
        started = comm.statistics.start(flat.tensor)
        if not comm.arrivals.take_from(source, tag, flat.tensor):
            Transfer(comm, _posted(comm, source, group.recv, flat.tensor, tag), source, flat, into=True).wait()
        comm.last_source = source
    else:
        flat = Flat(comm, value)
        started = comm.statistics.start(flat.tensor)
        comm.last_source = comm.arrivals.take(tag, flat.tensor)
    comm.statistics.finish("recv", started, 0, 0, flat.tensor.nbytes)
    return flat.land()


def exchange(
    comm: Communicator,
    sends: Sequence[Message],
    receives: Sequence[Message],
    tag: int = PAYLOAD_TAG,
    *,
    everyone: bool = True,
) -> None:
    """Send and receive all messages at once, in place; empty ones are left out on both sides.

    Args:
        comm: the ranks.
        sends: what goes to whom.
        receives: what comes from whom.
        tag: of all these messages.
        everyone: whether all ranks of the group take part, as a device's batch demands of a group's first operation.

    Raises:
        PeerLost: a rank is gone.
    """
    group = comm.group
    sends = [message for message in sends if message[1].numel()]
    receives = [message for message in receives if message[1].numel()]
    if group is None or not (sends or receives):
        return
    if comm.device.type != "cpu" and everyone:
        # One batch: single transfers would wait for each other on a device.
        operations = [dist.P2POp(dist.isend, as_bytes(tensor), group=group, group_peer=peer) for peer, tensor in sends]
        operations += [dist.P2POp(dist.irecv, as_bytes(into), group=group, group_peer=peer) for peer, into in receives]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return
    works = [(peer, _posted(comm, peer, group.recv, tensor, tag)) for peer, tensor in receives]
    works += [(peer, _posted(comm, peer, group.send, tensor, tag)) for peer, tensor in sends]
    for peer, work in works:
        try:
            work.wait()
        except RuntimeError as error:
            raise lost(comm.rank, peer, comm.label, error) from error


def header(comm: Communicator, tensor: torch.Tensor, *, array: bool = False) -> torch.Tensor:
    """Dtype and shape of ``tensor`` as numbers of fixed length, and whether it was an ``array``.

    Raises:
        CommunicationError: more dimensions or another dtype than a header can say.
    """
    if tensor.dim() > _DIMENSIONS or tensor.dtype not in _DTYPES:
        raise CommunicationError(
            f"a tensor of {tensor.dim()} dimensions and {tensor.dtype} cannot be announced: at most {_DIMENSIONS} "
            "dimensions and a dtype of numbers."
        )
    shape = [*tensor.shape, *[0] * (_DIMENSIONS - tensor.dim())]
    facts = [_DTYPES.index(tensor.dtype), int(array), tensor.dim(), *shape]
    return torch.tensor(facts, dtype=torch.int64, device=comm.device)


def empty_header(comm: Communicator) -> torch.Tensor:
    """One to receive into."""
    return torch.empty(3 + _DIMENSIONS, dtype=torch.int64, device=comm.device)


def announced(comm: Communicator, head: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """An empty tensor of the dtype and shape that ``head`` says, and whether it stands for an array."""
    kind, array, dimensions, *shape = head.tolist()
    return torch.empty(shape[:dimensions], dtype=_DTYPES[kind], device=comm.device), bool(array)


def exchange_announced(comm: Communicator, sends: Sequence[Message], sources: Sequence[int]) -> list[torch.Tensor]:
    """Send tensors whose receivers know neither shape nor dtype, and receive one from each of ``sources``.

    Two rounds of messages: first what comes, then what was announced. ``sends`` are tensors in their shape; so are
    the results.
    """
    heads = [(source, empty_header(comm)) for source in sources]
    exchange(comm, [(peer, header(comm, tensor)) for peer, tensor in sends], heads, HEADER_TAG)
    bodies = [(source, announced(comm, head)[0]) for source, head in heads]
    exchange(
        comm,
        [(peer, tensor.contiguous().view(-1)) for peer, tensor in sends],
        [(source, body.view(-1)) for source, body in bodies],
    )
    return [body for _, body in bodies]


def on_device(comm: Communicator, value: Any) -> torch.Tensor:
    """``value`` in its shape, contiguous, on the communicator's kind of device."""
    return Flat(comm, value).tensor.view(tensor_of(value).shape)
