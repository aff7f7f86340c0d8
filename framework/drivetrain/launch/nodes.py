"""How the launchers of several nodes meet, agree on attempts, and tell each other of a failure.

The number of nodes is fixed. Each attempt has keys of its own, so that restarted workers never read the addresses that
the dead left behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from drivetrain.errors import ConfigurationError, WorkerError
from drivetrain.launch import stores
from drivetrain.launch.failure import Failure

if TYPE_CHECKING:
    from torch.distributed import TCPStore

FAILED = "failed"
LEAVING = 2.0  # seconds that the first node waits for the others before it takes the store away
TICK = 0.1


class FixedNodes(RendezvousHandler):
    """A rendezvous of ``num_nodes`` launchers; the first hosts the store.

    Args:
        node_rank: this node.
        num_nodes: all nodes.
        address: host of the first node.
        port: its port; 0 lets a single node take any.
        start_timeout: seconds that the others may take to come.
        timeout: seconds that an operation on the store may take.
        tick: called while waiting; raises to give up.
    """

    def __init__(
        self,
        node_rank: int,
        num_nodes: int,
        address: str,
        port: int,
        *,
        start_timeout: float,
        timeout: float,
        tick: Callable[[], None],
    ) -> None:
        self._node_rank = node_rank
        self._num_nodes = num_nodes
        self._address = address
        self._port = port
        self._start_timeout = start_timeout
        self._timeout = timeout
        self._tick = tick
        self._tcp: TCPStore | None = None
        self.attempt = -1

    @property
    def use_agent_store(self) -> bool:
        """The workers join the store of the first node; none of them hosts one."""
        return True

    def get_backend(self) -> str:
        """The name of this rendezvous."""
        return "fixed"

    def get_run_id(self) -> str:
        """One store serves one job."""
        return "drivetrain"

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes for the next attempt.

        Raises:
            ConfigurationError: they did not come in time, or the port is taken.
        """
        if self._tcp is None:
            self._tcp = self._open()
        self.attempt += 1
        # Whoever is still in an older attempt leaves it when this key is there.
        self._tcp.set(f"begun_{self.attempt}", "1")
        store = PrefixStore(f"launchers_{self.attempt}", self._tcp)
        self._meet(store, "here", self._start_timeout)
        info = RendezvousStoreInfo(self._address, self._port)
        return RendezvousInfo(store, self._node_rank, self._num_nodes, info)

    def _open(self) -> TCPStore:
        if self._node_rank == 0:
            loopback = self._num_nodes == 1 or self._address in (stores.LOOPBACK, "localhost")
            store = stores.host(self._port, loopback=loopback, timeout=self._timeout)
            self._port = store.port
            return store
        deadline = time.monotonic() + self._start_timeout
        while True:
            store = stores.join(
                self._address,
                self._port,
                who=f"node {self._node_rank}",
                wait=self._start_timeout,
                timeout=self._timeout,
                tick=self._tick,
            )
            if not self._has_left(store):
                return store
            del store  # the first node has still to close it
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"node {self._node_rank} waited {self._start_timeout:g} s at {self._address}:{self._port}, where"
                    " the first node still holds the job before this one: see its log, or use another master_port"
                )
            time.sleep(TICK)

    def _has_left(self, store: TCPStore) -> bool:
        """Whether ``store`` is that of a job which this node has left: a script's next stage comes to the same port."""
        try:
            return bool(store.check([f"left_{self._node_rank}"]))
        except RuntimeError:  # it was closed in between
            return True

    def _meet(self, store: Any, word: str, wait: float) -> None:
        if self._num_nodes == 1:
            return
        deadline = time.monotonic() + wait
        store.set(f"{word}_{self._node_rank}", "1")
        while missing := [node for node in range(self._num_nodes) if not store.check([f"{word}_{node}"])]:
            self._tick()
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"node {self._node_rank} waited {wait:g} s at {self._address}:{self._port} for "
                    f"node {', '.join(map(str, missing))} of {self._num_nodes}: start them with the same master_addr "
                    "and master_port, or raise start_timeout"
                )
            time.sleep(TICK)

    def num_nodes_waiting(self) -> int:
        """Asked by the agent while its workers run: 1 where another node has begun the next attempt.

        Raises:
            DrivetrainError: another node has failed for good.
        """
        if self._num_nodes == 1:
            return 0
        if (failure := self.peer_failure()) is not None:
            raise failure.error()
        return int(self._check(f"begun_{self.attempt + 1}"))

    def peer_failure(self) -> Failure | None:
        """The failure that ended the job on another node, if one did."""
        if self._tcp is None or self._num_nodes == 1 or not self._check(FAILED):
            return None
        return Failure.from_json(self._tcp.get(FAILED).decode())

    def announce(self, failure: Failure) -> Failure:
        """Tell the other nodes that the job is over; returns the failure that was told first."""
        if self._tcp is None or self._num_nodes == 1:
            return failure
        try:
            return Failure.from_json(self._tcp.compare_set(FAILED, "", failure.as_json()).decode())
        except RuntimeError:  # the first node is gone, and with it those who could listen
            return failure

    def finish(self) -> None:
        """Wait until the workers of all nodes have finished, then part without taking the store from anyone."""
        if self._num_nodes == 1 or self._tcp is None:
            return
        finished = PrefixStore(f"finished_{self.attempt}", self._tcp)
        finished.set(str(self._node_rank), "1")
        keys = [str(node) for node in range(self._num_nodes)]
        while True:
            self._tick()
            if (failure := self.peer_failure()) is not None:
                raise failure.error()
            try:
                if finished.check(keys):
                    break
            except RuntimeError as error:
                raise self._gone() from error
            time.sleep(TICK)
        self._part()

    def _part(self) -> None:
        assert self._tcp is not None
        left = [f"left_{node}" for node in range(1, self._num_nodes)]
        if self._node_rank > 0:
            self._tcp.set(f"left_{self._node_rank}", "1")
            return
        deadline = time.monotonic() + LEAVING
        while not self._tcp.check(left) and time.monotonic() < deadline:
            time.sleep(0.02)

    def linger(self) -> None:
        """Keep the store a moment after a failure, so that the other nodes can still read whose it was."""
        if self._num_nodes > 1 and self._node_rank == 0 and self._tcp is not None:
            self._part()

    def leave(self) -> None:
        """Let the first node know that this one has read all it needs."""
        if self._num_nodes > 1 and self._node_rank > 0 and self._tcp is not None:
            try:
                self._part()
            except RuntimeError:
                return  # the first node did not wait

    def _check(self, key: str) -> bool:
        assert self._tcp is not None
        try:
            return bool(self._tcp.check([key]))
        except RuntimeError as error:
            raise self._gone() from error

    def _gone(self) -> WorkerError:
        return WorkerError(f"the first node of the job at {self._address}:{self._port} is gone", rank=0)

    def is_closed(self) -> bool:
        """Never: the number of nodes is fixed."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: nobody joins later."""

    def shutdown(self) -> bool:
        """Close the store."""
        self._tcp = None
        return True
