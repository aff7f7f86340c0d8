"""The key-value store through which the processes of a job find each other: hosted by one, joined by the rest."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from drivetrain.errors import ConfigurationError, Interrupted
from drivetrain.launch import signals

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

LOOPBACK = "127.0.0.1"
RETRY = 0.1  # seconds between two looks for a host that is not up yet
SILENCE = 60.0  # seconds after which a connection that carries nothing any more is taken for cut
FIRST_PAUSE = 0.001  # seconds before the second look for a key; each pause is twice the last one, up to RETRY
ANSWER = 30.0  # seconds that a listening store may take to answer; one who listens there and is no store never does


def host(port: int, *, loopback: bool, timeout: float) -> TCPStore:
    """A store that listens in this process on ``port`` (0: any free one), on loopback only or on every interface.

    Raises:
        ConfigurationError: the port is taken.
    """
    from torch.distributed import TCPStore

    address = LOOPBACK if loopback else ""
    try:
        # Bound here and handed over: the store itself would listen on every interface.
        listener = socket.create_server((address, port), backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} is taken on this host: set another master_port (MASTER_PORT) that is free on node 0"
            ) from error
        raise ConfigurationError(f"cannot listen on port {port}: {error.strerror}: set another master_port") from error
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join(
    address: str, port: int, *, who: str, wait: float, timeout: float, tick: Callable[[], None] = lambda: None
) -> TCPStore:
    """A client of the store at ``address:port``, once it is up.

    Args:
        address: host name or address.
        port: its port.
        who: who is joining, for the message: ``"rank 1"``, ``"node 1"``.
        wait: seconds to wait for the store to be up.
        timeout: seconds that an operation on the store may take later.
        tick: called while waiting, about ten times a second; may raise.

    Raises:
        ConfigurationError: no store answers there in time.
    """
    deadline = time.monotonic() + wait
    reason = "nobody listens there"
    while True:
        tick()
        left = deadline - time.monotonic()
        if left <= 0:
            raise ConfigurationError(
                f"{who} could not reach {address}:{port} within {wait:g} s ({reason}): start the first node too, "
                "correct master_addr and master_port, or raise start_timeout"
            )
        try:
            # Asked first with a plain socket: the store's own wait cannot be interrupted.
            socket.create_connection((address, port), timeout=min(left, 1.0)).close()
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(min(left, RETRY))
            continue
        store = _client(address, port, limit=max(0.1, min(left, ANSWER)), silence=min(timeout, SILENCE), tick=tick)
        if store is None:
            reason = "who listens there is no store of this job"
            time.sleep(RETRY)
            continue
        store.set_timeout(timedelta(seconds=timeout))
        return store


def wait(store: Store, keys: list[str], timeout: float, look: Callable[[], None] = lambda: None) -> None:
    """Return once ``keys`` are there. The store's own wait would pass over a signal, and tell of each time-out.

    Args:
        look: called between two looks for a key; raises where none can come any more.

    Raises:
        Interrupted: a signal asks this process to stop, as where the rank that would set a key has ended.
        RuntimeError: a key did not come in ``timeout`` seconds, or who hosts the store is gone.
    """
    from torch.distributed import DistStoreError

    deadline, pause = time.monotonic() + timeout, FIRST_PAUSE
    for key in keys:  # one at a time: of many ranks each would ask for all again and again
        while not store.check([key]):
            signum = signals.pending()
            if signum is not None:
                raise Interrupted(signum)
            look()
            if time.monotonic() >= deadline:
                raise DistStoreError(f"{key} did not come within {timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, RETRY)


def _client(address: str, port: int, *, limit: float, silence: float, tick: Callable[[], None]) -> TCPStore | None:
    """A connected store, or ``None`` where whoever listens does not answer as one within ``limit`` seconds. Its
    operations fail once nothing has come through for ``silence`` seconds.

    In a thread, because the store waits for the first answer without any limit; that wait is ended from outside.
    """
    from torch.distributed import TCPStore

    made: list[TCPStore] = []

    def connect() -> None:
        with contextlib.suppress(RuntimeError):  # refused, or cut off below: then nothing was made
            made.append(
                TCPStore(address, port, is_master=False, timeout=timedelta(seconds=limit), wait_for_workers=False)
            )

    thread = threading.Thread(target=connect, name="join-store", daemon=True)
    # A forked process has its parent's connections too: to cut those would cut the parent off.
    former = _descriptors()
    thread.start()
    try:
        deadline = time.monotonic() + limit
        while thread.is_alive() and time.monotonic() < deadline:
            tick()
            thread.join(RETRY)
    finally:
        if thread.is_alive():
            _each_connection(port, _descriptors() - former, lambda one: one.shutdown(socket.SHUT_RDWR))
            thread.join(RETRY)
    _each_connection(port, _descriptors() - former, lambda one: _notice_silence(one, silence))
    return made[0] if made else None


def _descriptors() -> set[int]:
    """Those that are open. That of the listing itself is not any more: the next connection may get its number."""
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            os.fstat(int(name))
            found.add(int(name))
    return found


def _each_connection(port: int, descriptors: set[int], act: Callable[[socket.socket], None]) -> None:
    """``act`` on those of ``descriptors`` that are connections to ``port``."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # not a socket, not connected, or closed meanwhile
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.getpeername()[1:2] == (port,):
                    act(connection)


def _notice_silence(connection: socket.socket, seconds: float) -> None:
    """A cable that is pulled, or a host without power, closes no connection: whoever waits for an answer would wait
    for a quarter of an hour. Linux names; elsewhere the system's own patience stays."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    probes = 3
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds / 2)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(seconds / 2 / probes)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, int(1000 * seconds)))
