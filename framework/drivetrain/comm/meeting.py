"""How ranks of one host come to share memory: who is here, and who gets which memory of whom.

Memory is anonymous, so none is left behind by a process that is killed, and travels as a descriptor over a socket in a
folder that only this user can enter.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import sys
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from drivetrain.comm import plain
from drivetrain.comm.shared_memory import QUEUE_BYTES, Link, SharedMemory
from drivetrain.launch.temporary import temporary_folder

if TYPE_CHECKING:
    from drivetrain.comm.communicator import Communicator

SWITCH = "DRIVETRAIN_SHARED_MEMORY"  # 0: not to be used

_PATIENCE = 10.0  # seconds that a rank waits for another's links, once all are known to be here
_RANK = struct.Struct("=i")
_LONGEST_PATH = 100  # bytes; a socket's address has room for 108
_MOST = 16  # ranks: each link takes two of the files that a process may have open


def meet(comm: Communicator) -> SharedMemory | None:
    """Links from this rank to all others of ``comm``, or None on every rank: where they are not on one host, or cannot
    share memory. Exchanges messages, so all ranks must ask at the same point. Raises what the transport raises."""
    from drivetrain.comm.communicator import Communicator

    # Not among the traffic that is counted: it happens once, at a moment that the caller did not choose.
    quiet = Communicator(comm.group, comm.device, comm.label)
    with ExitStack() as stack:
        path, listener = None, None
        here = _place() if comm.world_size <= _MOST else None
        if here is not None:
            with suppress(OSError):  # no memory, no folder, no socket: said below
                memory = _memory(comm.world_size, stack)
                path = str(stack.enter_context(temporary_folder("meet")) / "s")
                listener = _listening(path, comm.world_size, stack)
        said = plain.gather_json(quiet, [None if listener is None else here, path], None)
        if listener is None or any(place != here for place, _ in said):
            return None
        links: dict[int, Link] = {}
        reason = ""
        try:
            links = _links(comm.rank, [path for _, path in said], listener, memory, stack)
        except OSError as error:
            reason = str(error)
        # All have met before the folder goes.
        if any(plain.gather_json(quiet, reason, None)):
            for link in links.values():
                link.wire.close()
            return None
    return SharedMemory(comm.rank, comm.label, links, _patience(comm).total_seconds())


def _patience(comm: Communicator) -> timedelta:
    """How long an operation of the group may take, which a group that somebody else made says itself."""
    assert comm.group is not None
    options = getattr(comm.group._get_backend(torch.device("cpu")), "options", None)
    said: timedelta = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
    return comm.timeout or said


def _memory(size: int, stack: ExitStack) -> int:
    """A descriptor of memory with a queue for each of ``size`` ranks; closed with ``stack``.

    Raises:
        OSError: the system has none.
    """
    memory = os.memfd_create("drivetrain", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, memory)
    os.ftruncate(memory, size * QUEUE_BYTES)
    # Who reads memory that has shrunk is killed.
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return memory


def _listening(path: str, size: int, stack: ExitStack) -> socket.socket | None:
    if len(os.fsencode(path)) > _LONGEST_PATH:
        return None
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(path)
    listener.listen(size)
    return listener


def _place() -> list[str] | None:
    """What processes that can share memory and reach each other's sockets have in common; None where it cannot be."""
    if os.environ.get(SWITCH, "1") == "0" or sys.platform != "linux":
        return None  # only Linux has such memory
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "net", "user")]
    except OSError:
        return None
    return [boot, *spaces, str(os.getuid())]


def _links(rank: int, paths: list[str], listener: socket.socket, memory: int, stack: ExitStack) -> dict[int, Link]:
    """Links to all other ranks: those above connect to ``listener``, those below listen at their paths; each gets the
    descriptor of this rank's ``memory``. What is opened is closed with ``stack``.

    Raises:
        OSError: the system refuses, or a rank did not come.
    """
    size = len(paths)
    own = _mapped(memory, 0, size * QUEUE_BYTES)
    wires: dict[int, socket.socket] = {}
    theirs: dict[int, torch.Tensor] = {}

    def take(wire: socket.socket) -> int:
        """The other end's rank, with its memory."""
        said, descriptors, _, _ = socket.recv_fds(wire, _RANK.size, 1)
        if len(said) < _RANK.size or not descriptors:
            raise ConnectionError("a rank closed its connection while all met")
        peer = int(_RANK.unpack(said)[0])
        try:
            theirs[peer] = _mapped(descriptors[0], rank * QUEUE_BYTES, QUEUE_BYTES)
        finally:
            os.close(descriptors[0])
        return peer

    def give(wire: socket.socket) -> None:
        socket.send_fds(wire, [_RANK.pack(rank)], [memory])

    for peer in range(rank):
        wires[peer] = stack.enter_context(socket.socket(socket.AF_UNIX))
        wires[peer].settimeout(_PATIENCE)
        wires[peer].connect(paths[peer])
        give(wires[peer])
    listener.settimeout(_PATIENCE)
    for _ in range(rank + 1, size):
        wire = stack.enter_context(listener.accept()[0])
        wire.settimeout(_PATIENCE)
        wires[take(wire)] = wire
        give(wire)
    for peer in range(rank):
        take(wires[peer])
    return {
        peer: Link(peer, wire.dup(), own[peer * QUEUE_BYTES : (peer + 1) * QUEUE_BYTES], theirs[peer])
        for peer, wire in sorted(wires.items())
    }


def _mapped(descriptor: int, start: int, length: int) -> torch.Tensor:
    """That part of the memory as bytes."""
    return torch.frombuffer(mmap.mmap(descriptor, length, offset=start), dtype=torch.uint8)
