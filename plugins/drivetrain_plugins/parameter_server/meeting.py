"""Workers and servers meet for a stage: servers leave their address, and keys where connections are secured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain.launch import Job
from drivetrain.launch.interfaces import address_towards
from drivetrain_plugins.parameter_server.board import Board
from drivetrain_plugins.parameter_server.client import Client
from drivetrain_plugins.parameter_server.endpoint import Keys, Listener
from drivetrain_plugins.parameter_server.layout import Layout
from drivetrain_plugins.parameter_server.window import Window


@dataclass(frozen=True)
class Roles:
    """Who is what.

    Attributes:
        workers: number of ranks that train, the first ones.
        servers: ranks of the servers, by their number.
        trains, serves: whether this rank is a worker, and whether a server is here.
        index: number of the server here, where there is one.
    """

    workers: int
    servers: Sequence[int]
    trains: bool
    serves: bool
    index: int

    @classmethod
    def of(cls, job: Job, servers: int, embedded: bool) -> Roles:
        """The last ``servers`` ranks serve; ``embedded``: one server is beside the first worker."""
        if embedded:
            return cls(job.world_size, (0,), True, job.rank == 0, 0)
        workers = job.world_size - servers
        serves = job.rank >= workers
        return cls(workers, range(workers, job.world_size), not serves, serves, job.rank - workers)


def meet(
    job: Job, roles: Roles, stage: int, *, encrypt: bool, largest: int, zero_copy: bool
) -> tuple[Listener | None, Client | None]:
    """The socket of the server here and the connections of the worker here; None for what is not here.

    Args:
        stage: number of the meeting.
        encrypt: whether with CURVE keys.
        largest: bytes of the largest tensor that the server here takes.
        zero_copy: as :class:`Client` takes it.
    """
    board, listener, client = Board(job, stage), None, None
    keys = Keys.new() if encrypt else None
    if keys is not None and roles.trains:
        board.set(f"key of worker {job.rank}", keys.public.decode())
    if roles.serves:
        own = Keys.new() if encrypt else None
        allowed = {board.get(f"key of worker {rank}").encode() for rank in range(roles.workers)} if own else None
        host = "127.0.0.1" if job.num_nodes == 1 else address_towards(job.master_addr)
        listener = Listener(host, own, allowed, largest)
        board.set(f"key of server {roles.index}", own.public.decode() if own is not None else "")
        board.set(f"server {roles.index}", listener.address)
    if roles.trains:
        count = range(len(roles.servers))
        addresses = [board.get(f"server {number}") for number in count]
        public = [board.get(f"key of server {number}").encode() for number in count] if keys else None
        client = Client(addresses, job.rank, job.timeout, keys, public, zero_copy, roles.servers)
        client.greet()
    return listener, client


def share_memory(
    job: Job, roles: Roles, stage: int, layouts: Sequence[Layout], wanted: bool
) -> tuple[Window | None, list[Window | None]]:
    """Memory that the server here shares, and what the worker here shares with each server; None where there is none.

    Args:
        stage: number of the meeting.
        layouts: of what each server holds.
        wanted: whether processes are on one host and may share; the same on every rank.
    """
    windows: list[Window | None] = [None] * len(layouts)
    if not wanted:
        return None, windows
    board, own = Board(job, stage), None
    if roles.serves:
        own = Window.create(layouts[roles.index], roles.workers)
        board.set(f"window {roles.index}", own.handle if own is not None else "")
    if roles.trains:
        for number, layout in enumerate(layouts):
            beside = roles.serves and number == roles.index
            handle = board.get(f"window {number}")
            windows[number] = own if beside else Window.open(handle, layout, roles.workers)
    return own, windows
