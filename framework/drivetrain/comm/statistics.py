"""What a communicator sent: bytes, messages and seconds, per operation and, when profiled, per phase of training."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import finalize

from drivetrain.comm import phase

if TYPE_CHECKING:
    import torch

_PENDING = 256  # device timings waited for before they are looked at


def bus_factor(operation: str, world_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines them: what the slowest link must carry for each
    byte of payload, so that figures of one machine are comparable between operations and numbers of ranks.

    Anything that is not a collective with a factor of its own nor a single message (``ring``, ``tree``, ...) is an
    all-reduce.
    """
    share = (world_size - 1) / world_size
    if operation in ("send", "recv", "broadcast", "reduce", "barrier", "plain", "object"):
        return 1.0
    if operation in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return share
    return 2 * share


@dataclass(slots=True)
class Traffic:
    """The traffic of one operation on this rank.

    ``payload`` is the size in bytes that nccl-tests would name the operation by: the tensor of an all-reduce, the
    whole result of an all-gather, the whole input of a reduce-scatter.
    """

    calls: int = 0
    bytes_sent: int = 0
    messages: int = 0
    seconds: float = 0.0
    payload: int = 0

    def add(self, calls: int, bytes_sent: int, messages: int, seconds: float, payload: int) -> None:
        self.calls += calls
        self.bytes_sent += bytes_sent
        self.messages += messages
        self.seconds += seconds
        self.payload += payload

    def include(self, other: Traffic) -> None:
        """Add what ``other`` counted."""
        self.add(other.calls, other.bytes_sent, other.messages, other.seconds, other.payload)


@dataclass(slots=True)
class _Timing:
    """A timed operation of a device: two events, and where the seconds go once both have passed."""

    start: Any
    end: Any
    places: Iterable[Traffic]
    payload: int = 0


@dataclass
class Statistics:
    """Running totals of one communicator on this rank, by operation; while ``profiling`` also by phase and operation.

    Bytes and messages of point-to-point operations are exact. For a collective that the transport runs itself they are
    those of the bandwidth-optimal algorithm, since transports do not report theirs. Seconds are the caller's time
    inside the operation; for a CUDA tensor that is the time to enqueue it, and the device's own time while profiling.

    Attributes:
        operations: totals by operation.
        phases: totals by phase, then operation; only what happened while profiling.
        profiling: see :meth:`drivetrain.comm.Communicator.enable_profiling`.
        children: of the communicators that were made from this one. What one counted stays when its communicator is
            gone: first here, then, when further ones are made, in ``ended``.
        ended: of communicators that are gone, by label and world size.
    """

    label: str = "world"
    world_size: int = 1
    operations: dict[str, Traffic] = field(default_factory=dict)
    phases: dict[str, dict[str, Traffic]] = field(default_factory=dict)
    profiling: bool = False
    _pending: list[_Timing] = field(default_factory=list)

    __hash__ = object.__hash__

    def __post_init__(self) -> None:
        self._begin_family()

    def _begin_family(self) -> None:
        self.children: set[Statistics] = set()
        self.ended: dict[tuple[str, int], Statistics] = {}
        self._parent: Statistics | None = None
        self._gone: deque[Statistics] = deque()  # of the whole family, as is the lock
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Without the family, which is of communicators that do not travel."""
        own = ("label", "world_size", "operations", "phases", "profiling", "_pending")
        return {name: value for name, value in self.__dict__.items() if name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_family()

    # -- counting -----------------------------------------------------------------------------------------------
    def start(self, tensor: torch.Tensor | None = None) -> Any:
        """What :meth:`finish` takes: a clock reading, or an event on the current stream of ``tensor``'s device."""
        if self.profiling and tensor is not None and tensor.is_cuda:
            import torch

            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return perf_counter()

    def finish(self, operation: str, started: Any, bytes_sent: int, messages: int, payload: int = 0) -> None:
        """Add one call of ``operation`` that began at ``started``."""
        if type(started) is float:
            self._add(operation, bytes_sent, messages, perf_counter() - started, payload)
            return
        import torch

        end = torch.cuda.Event(enable_timing=True)
        end.record()
        places = self._add(operation, bytes_sent, messages, 0.0, 0)
        self._pending.append(_Timing(started, end, places, payload))
        if len(self._pending) % _PENDING == 0:
            self._settle()

    def record(
        self, operation: str, *, bytes_sent: int = 0, messages: int = 0, seconds: float = 0.0, payload: int = 0
    ) -> None:
        """Add one call of ``operation``."""
        self._add(operation, bytes_sent, messages, seconds, payload)

    def _add(self, operation: str, bytes_sent: int, messages: int, seconds: float, payload: int) -> Iterable[Traffic]:
        """Add one call of ``operation``; returns where it was added. Written out: every operation pays for it."""
        traffic = self.operations.get(operation)
        if traffic is None:
            traffic = self.operations.setdefault(operation, Traffic())
        traffic.calls += 1
        traffic.bytes_sent += bytes_sent
        traffic.messages += messages
        traffic.seconds += seconds
        traffic.payload += payload
        if not self.profiling:
            return (traffic,)
        rows = self.phases.get(phase.current.name)
        if rows is None:
            rows = self.phases.setdefault(phase.current.name, {})
        detail = rows.get(operation)
        if detail is None:
            detail = rows.setdefault(operation, Traffic())
        detail.calls += 1
        detail.bytes_sent += bytes_sent
        detail.messages += messages
        detail.seconds += seconds
        detail.payload += payload
        return traffic, detail

    def _settle(self) -> None:
        """Take over the seconds of device operations that are over; waits for none."""
        waiting = []
        for timing in self._pending:
            if timing.end.query():
                for place in timing.places:
                    place.add(0, 0, 0, timing.start.elapsed_time(timing.end) / 1e3, timing.payload)
            else:
                waiting.append(timing)
        self._pending = waiting

    def reset(self) -> None:
        """Forget everything counted so far."""
        self.operations.clear()
        self.phases.clear()
        self._pending.clear()
        with self._lock:
            self._take_over()
            self.ended.clear()

    # -- reading ------------------------------------------------------------------------------------------------
    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent, over all operations."""
        return sum(traffic.bytes_sent for traffic in self.operations.values())

    @property
    def messages(self) -> int:
        """Messages that this rank sent, over all operations."""
        return sum(traffic.messages for traffic in self.operations.values())

    @property
    def seconds(self) -> float:
        """Seconds that this rank spent inside operations."""
        return sum(traffic.seconds for traffic in self.operations.values())

    def enable(self, on: bool = True) -> None:
        """Profile, or stop, here and in all descendants."""
        for each in self.family():
            each.profiling = on

    def adopt(self, child: Statistics, communicator: object) -> Statistics:
        """Count ``child``, of a ``communicator`` that was made from this one's: it is profiled and reported with it.
        Returns ``child``."""
        child.profiling = self.profiling
        child._parent, child._gone, child._lock = self, self._gone, self._lock
        with self._lock:
            self.children.add(child)
            self._take_over()
        # This may be called anywhere, in the midst of any of this, and so does no more than to say it.
        finalize(communicator, self._gone.append, child).atexit = False
        return child

    def _take_over(self) -> None:
        """What those of the family counted whose communicators are gone."""
        for _ in range(len(self._gone)):
            self._gone.popleft()._end()

    def _end(self) -> None:
        """Its communicator is gone: what it counted is its parent's, and so are its children."""
        parent = self._parent
        assert parent is not None
        parent.children.remove(self)
        for child in self.children:
            child._parent = parent
        parent.children |= self.children
        self._settle()
        for one in (self, *self.ended.values()):
            kept = parent.ended.setdefault((one.label, one.world_size), Statistics(one.label, one.world_size))
            kept.include(one)

    def include(self, other: Statistics) -> None:
        """Add what ``other`` counted itself."""
        for name, traffic in other.operations.items():
            self.operations.setdefault(name, Traffic()).include(traffic)
        for where, rows in other.phases.items():
            for name, traffic in rows.items():
                self.phases.setdefault(where, {}).setdefault(name, Traffic()).include(traffic)
        self._pending += other._pending  # of which the device has not said yet how long it takes

    def family(self) -> list[Statistics]:
        """This one and all descendants."""
        found = [self]
        for child in list(self.children):
            found += child.family()
        return found

    def stats(self) -> dict[str, Any]:
        """Plain data; see :meth:`drivetrain.comm.Communicator.stats`."""
        with self._lock:  # or what is taken over meanwhile would count twice
            return self._stats()

    def _stats(self) -> dict[str, Any]:
        total = Traffic()
        by_group: dict[str, Traffic] = {}
        by_operation: dict[str, _Row] = {}
        by_phase: dict[str, dict[str, _Row]] = {}
        for each in (one for member in self.family() for one in (member, *member.ended.values())):
            each._settle()
            for name, traffic in list(each.operations.items()):
                total.include(traffic)
                by_group.setdefault(each.label, Traffic()).include(traffic)
                by_operation.setdefault(name, _Row()).include(name, traffic, each.world_size)
            for where, rows in list(each.phases.items()):
                for name, traffic in list(rows.items()):
                    row = by_phase.setdefault(where, {}).setdefault(name, _Row())
                    row.include(name, traffic, each.world_size)
        return {
            "bytes_sent": total.bytes_sent,
            "messages": total.messages,
            "seconds": total.seconds,
            "operations": {name: row.plain() for name, row in by_operation.items()},
            "phases": {where: {name: row.plain() for name, row in rows.items()} for where, rows in by_phase.items()},
            "groups": {
                label: {"bytes_sent": t.bytes_sent, "messages": t.messages, "seconds": t.seconds}
                for label, t in by_group.items()
            },
        }


@dataclass(slots=True)
class _Row:
    """Traffic of one operation over groups of different sizes, whose bus factors differ."""

    traffic: Traffic = field(default_factory=Traffic)
    on_bus: float = 0.0

    def include(self, operation: str, traffic: Traffic, world_size: int) -> None:
        self.traffic.include(traffic)
        self.on_bus += traffic.payload * bus_factor(operation, world_size)

    def plain(self) -> dict[str, Any]:
        t = self.traffic
        rate = 1 / t.seconds if t.seconds > 0 else 0.0
        return {
            "calls": t.calls,
            "bytes_sent": t.bytes_sent,
            "messages": t.messages,
            "seconds": t.seconds,
            "algorithm_bandwidth": t.payload * rate,
            "bus_bandwidth": self.on_bus * rate,
        }
