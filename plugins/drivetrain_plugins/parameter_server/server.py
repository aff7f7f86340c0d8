"""A server: holds some of the parameters and their optimizer, takes gradients, gives weights.

``sync``: gradients of one clock are averaged over all workers, in the order of their ranks, before the optimizer steps
once: the result does not depend on who came first. ``async``: every gradient is a step of its own, on weights that may
be newer than those it was computed with; how much newer is its staleness (Ho et al., "Stale Synchronous Parallel",
2013, whose bound is ``max_staleness``: no worker is answered while it is more clocks ahead of the slowest).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import zmq
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.named_optimizer import packed_again, renamed
from drivetrain.optimizer import is_torchs
from drivetrain_plugins.parameter_server import states
from drivetrain_plugins.parameter_server.departures import PeerGoneError
from drivetrain_plugins.parameter_server.endpoint import Listener
from drivetrain_plugins.parameter_server.groups import check_groups, own_settings, set_groups
from drivetrain_plugins.parameter_server.packing import pack
from drivetrain_plugins.parameter_server.store import Store
from drivetrain_plugins.parameter_server.window import Window
from drivetrain_plugins.parameter_server.wire import Message, WireError, decode, encode, size
from drivetrain_plugins.strategies.first_step import changed, numbers

_LOOK = 100  # milliseconds between two looks at whether to stop


class Server:
    """One server of ``workers`` workers.

    Args:
        listener: the bound socket.
        parameters: this server's own copies, by name.
        optimizer: steps them.
        workers: how many push.
        mode: ``"sync"`` or ``"async"``.
        max_staleness: clocks that a worker may be ahead of the slowest, None for any number.
        zero_copy: send tensors from where they lie. ZeroMQ then keeps a thread in this process for good.
        window: memory shared with workers, None for none.
        names: ``id(parameter)`` to its name where other servers hold other parameters; what the optimizer's first step
            made of those here is told then.

    Attributes:
        version: how often the optimizer stepped.
        staleness: ``[pushes, sum, largest]`` of the staleness of pushes.
        refused: messages that were not understood.
        waits: called again and again while nothing comes; raises where nothing can come any more.
        bytes_sent, messages: what this server sent.
    """

    def __init__(
        self,
        listener: Listener,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer | None,
        workers: int,
        mode: str = "sync",
        max_staleness: int | None = None,
        zero_copy: bool = True,
        window: Window | None = None,
        names: Mapping[int, str] | None = None,
    ) -> None:
        self.zero_copy = zero_copy
        self.listener, self.parameters, self.optimizer = listener, dict(parameters), optimizer
        self.workers, self.mode, self.max_staleness = workers, mode, max_staleness
        self.store = Store(self.parameters, workers, mode == "async", window)
        self.layout = self.store.layout
        self.version = 0
        self.staleness = [0, 0, 0]
        self.refused = self.bytes_sent = self.messages = 0
        self.lock = threading.Lock()  # an embedded server's worker loads and reads states beside it
        self.stopping = False
        self.waits: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None
        self.done: set[int] = set()
        self.connections: dict[int, int] = {}  # file descriptor: the worker that it leads to
        self.clocks = dict.fromkeys(range(workers), 0)
        self.pushes: dict[int, Message] = {}
        self.applies: dict[int, Message] = {}
        self.waiting: dict[int, tuple[bytes, str]] = {}  # rank: who waits for what
        self.averaged = False  # whether all workers pushed in this clock
        self.square: float | None = None  # of the norm of the averaged gradients, where somebody asked
        self.told: list[dict[str, Any]] | None = None  # settings of groups, as a worker sent them last
        self.stepping = True  # whether any worker had a loss in this clock
        self.names = None if optimizer is None or is_torchs(optimizer) else names
        self.first: dict[str, str] | None = None  # what the first step changed
        self.heard: dict[int, int] = {}  # rank: the clock in which it was told

    # -- the loop -----------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Serve until every worker said goodbye.

        Raises:
            PeerGoneError: a worker is gone without a goodbye; the others have been told.
        """
        socket, departures = self.listener.socket, self.listener.departures
        poller = zmq.Poller()
        for source in (socket, departures.events):
            poller.register(source, zmq.POLLIN)
        try:
            while len(self.done) < self.workers and not self.stopping:
                ready = dict(poller.poll(_LOOK))
                if departures.events in ready:
                    left = [self.connections.pop(number, None) for number in departures.take()]
                    while socket.poll(0):  # what they sent before, such as a goodbye
                        self._take()
                    self._mourn([rank for rank in left if rank is not None and rank not in self.done])
                elif socket in ready:
                    self._take()
                else:
                    self.waits()
        except BaseException as error:
            self.failure = error
            raise

    def _take(self) -> None:
        sender, *frames = self.listener.socket.recv_multipart(copy=False)
        who = bytes(sender.buffer)
        try:
            message = decode([frame.buffer for frame in frames], self.store.areas)
            rank = message.number("rank")
            if not 0 <= rank < self.workers or who != f"worker-{rank}".encode():
                raise WireError(f"rank {rank} is none of the {self.workers} workers")
            if message.area not in (None, rank):
                raise WireError(f"worker {rank} speaks of memory that is not its own")
            self.connections[frames[-1].get(zmq.SRCFD)] = rank
            with self.lock:
                self._handle(who, rank, message)
        except WireError as error:
            self.refused += 1
            self._send(who, Message("refused", {"why": str(error)}))

    def _mourn(self, ranks: list[int]) -> None:
        """Nothing can go on without them: tell those who wait, and end."""
        for lost in ranks[:1]:
            for rank in range(self.workers):
                self._send(f"worker-{rank}".encode(), Message("lost", {"worker": lost}))
            raise PeerGoneError(f"rank {lost} is gone: its connection was closed without a goodbye.")

    def _handle(self, who: bytes, rank: int, message: Message) -> None:
        handler = {
            "hello": self._hello,
            "pull": self._pull,
            "push": self._push,
            "norm": self._of_average,
            "gradients": self._of_average,
            "apply": self._apply,
            "state": self._state,
            "load": self._load_sent,
            "done": self._done,
        }.get(message.kind)
        if handler is None:
            raise WireError(f"there is no message {message.kind[:40]!r}")
        handler(who, rank, message)

    def _send(self, who: bytes, message: Message) -> None:
        frames = encode(message)
        self.bytes_sent += size(message, frames)
        self.messages += 1
        self.listener.socket.send_multipart([who, *frames], copy=not self.zero_copy)

    def _weights(self, who: bytes, rank: int) -> None:
        fields: dict[str, Any] = {"version": self.version, "stepped": self.stepping, "staleness": self.staleness}
        if self.first is not None and self.heard.setdefault(rank, self.clocks[rank]) == self.clocks[rank]:
            fields["first"] = self.first
        self._send(who, Message("weights", fields, *self.store.weights_for(rank)))

    # -- messages -----------------------------------------------------------------------------------------------
    def _hello(self, who: bytes, rank: int, message: Message) -> None:
        """Now its connection is known."""

    def _pull(self, who: bytes, rank: int, message: Message) -> None:
        if "clock" in message.fields:
            self.clocks[rank] = message.number("clock")
        if message.fields.get("shares") and self.store.areas:
            self.store.sharing.add(rank)
        self._weights(who, rank)

    def _done(self, who: bytes, rank: int, message: Message) -> None:
        self.done.add(rank)
        self._release()

    def _push(self, who: bytes, rank: int, message: Message) -> None:
        clock = message.number("clock")
        if not self.layout.fits(message.tensors):
            raise WireError("a push does not have this server's parameters")
        self._check_present(message)
        if self.optimizer is None:
            raise WireError("nothing is trained in this stage")
        if clock > self.clocks[rank] + 1:
            raise WireError(f"a push of clock {str(clock)[:20]} came after that of clock {self.clocks[rank]}")
        message.amount("weight")  # refused now where it is none, not when all are averaged
        if self.mode == "async":
            self._push_now(who, rank, clock, message)
            return
        if clock <= self.clocks[rank] or self.averaged:  # it came twice: what it led to stands
            return
        self.pushes[rank] = message
        if len(self.pushes) == self.workers:
            self._average()
            for other, (waiting, kind) in list(self.waiting.items()):
                if kind in ("norm", "gradients"):
                    del self.waiting[other]
                    self._tell(waiting, other, kind)

    def _of_average(self, who: bytes, rank: int, message: Message) -> None:
        if self.averaged:
            self._tell(who, rank, message.kind)
        else:
            self.waiting[rank] = (who, message.kind)

    def _tell(self, who: bytes, rank: int, kind: str) -> None:
        """The norm of this clock's averaged gradients, or the gradients themselves."""
        if kind == "gradients":
            present = [self.parameters[name].grad is not None for name in self.layout.names]
            fields = {"present": present, "stepping": self.stepping}
            self._send(who, Message(kind, fields, *self.store.gradients_for(rank)))
            return
        if self.square is None:
            groups = self.optimizer.param_groups if self.optimizer is not None else []
            self.square = self.store.square(p for group in groups for p in group["params"])
        self._send(who, Message(kind, {"square": self.square}))

    def _apply(self, who: bytes, rank: int, message: Message) -> None:
        if message.number("clock") <= self.clocks[rank]:  # it came twice
            return
        self._check_step(message)
        self._replacements(message)
        self.applies[rank] = message
        self.waiting[rank] = (who, "weights")
        if len(self.applies) < self.workers or len(self.pushes) < self.workers:
            return
        first = self.applies[0]
        self.stepping = self.stepping and not any(one.fields.get("skip") for one in self.applies.values())
        replaced = self._replacements(first)
        if "weights" in replaced:
            self.store.set_weights(replaced["weights"])
        if "gradients" in replaced:
            self.store.set_gradients(replaced["gradients"], first.fields["present"])
        if self.stepping:
            factor, bound = (first.fields.get(name) for name in ("factor", "bound"))
            self.store.clip(*(value if isinstance(value, float) else None for value in (factor, bound)))
            self._step(first)
        for other, push in self.pushes.items():
            self.clocks[other] = push.number("clock")
        self.pushes.clear()
        self.applies.clear()
        self.averaged, self.square = False, None
        for other, (waiting, _) in list(self.waiting.items()):
            del self.waiting[other]
            self._weights(waiting, other)

    def _replacements(self, message: Message) -> dict[str, list[Tensor]]:
        """What hooks on the workers made of gradients and weights; the first worker sends it."""
        kinds = [kind for kind in ("gradients", "weights") if message.fields.get(kind)]
        size = len(self.layout.groups)
        parts = {kind: message.tensors[i * size : (i + 1) * size] for i, kind in enumerate(kinds)}
        if len(message.tensors) != size * len(kinds) or not all(self.layout.fits(part) for part in parts.values()):
            raise WireError(f"a {message.kind} does not have this server's parameters")
        if "gradients" in parts:
            self._check_present(message)
        return parts

    def _check_present(self, message: Message) -> None:
        present = message.fields.get("present")
        if not isinstance(present, list) or len(present) != len(self.parameters):
            raise WireError(f"a {message.kind} does not say which parameters it has gradients for")

    def _state(self, who: bytes, rank: int, message: Message) -> None:
        tensors: list[Tensor] = []
        state = self.state()
        entries = states.entries(state.get("state", {}), tensors)
        own = own_settings(self.optimizer, self.told) if self.optimizer is not None else []
        kept = pack([state.get("beside", {}), state.get("further", {}), own], tensors)
        self._send(who, Message("state", {"entries": entries, "kept": kept, "staleness": self.staleness}, tensors))

    def _load_sent(self, who: bytes, rank: int, message: Message) -> None:
        """Go on from what the first worker sends, who speaks for all: after it steps are others'."""
        if rank or self.pushes or self.applies:
            raise WireError("weights are loaded by the first worker, between two steps")
        size = len(self.layout.groups)
        weights, rest = message.tensors[:size], message.tensors[size:]
        if not self.layout.fits(weights):
            raise WireError("a load does not have this server's parameters")
        self._take_up(self.layout.split(weights), states.unpacked(message, rest, self.parameters))
        self._weights(who, rank)

    # -- gradients ----------------------------------------------------------------------------------------------
    def _average(self) -> None:
        """The mean over the workers of this clock, or the sum over the sum of weights where the module weighs."""
        pushes = [self.pushes[rank] for rank in range(self.workers)]
        self.stepping = any(push.fields.get("contributed") for push in pushes)
        weight = sum(push.amount("weight") for push in pushes)
        present = [any(flags) for flags in zip(*(push.fields["present"] for push in pushes), strict=True)]
        self.store.average([push.tensors for push in pushes], weight or float(self.workers), present)
        self.averaged = True

    def _push_now(self, who: bytes, rank: int, clock: int, message: Message) -> None:
        if clock <= self.clocks[rank]:  # it came twice
            self._weights(who, rank)
            return
        stale = self.version - message.number("version")
        if stale < 0:
            raise WireError("a push was computed with weights that there are not yet")
        self._check_step(message)
        pushes, total, largest = self.staleness
        self.staleness = [pushes + 1, total + stale, max(largest, stale)]
        self.clocks[rank] = clock
        if message.fields.get("contributed"):
            self.store.set_gradients(message.tensors, message.fields["present"])
            self._step(message)
        self.waiting[rank] = (who, "weights")
        self._release()

    def _release(self) -> None:
        """Answer the workers that are not too far ahead of the slowest (``async``)."""
        if self.mode != "async":
            return
        slowest = min((clock for rank, clock in self.clocks.items() if rank not in self.done), default=0)
        for rank, (who, _) in list(self.waiting.items()):
            if self.max_staleness is None or self.clocks[rank] - slowest <= self.max_staleness:
                del self.waiting[rank]
                self._weights(who, rank)

    def _check_step(self, message: Message) -> None:
        if self.optimizer is None:
            raise WireError("nothing is trained in this stage")
        check_groups(message.fields.get("groups"), self.optimizer, self.told)

    def _step(self, message: Message) -> None:
        assert self.optimizer is not None
        groups = message.fields["groups"]
        set_groups(groups, self.optimizer, self.told)
        self.told = groups
        if self.names is not None and self.first is None:
            before = numbers(self.optimizer, self.names)
            self.optimizer.step()
            self.first = changed(before, numbers(self.optimizer, self.names))
        else:
            self.optimizer.step()
        self.store.changed()
        self.version += 1

    # -- states -------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """The optimizer's :func:`drivetrain.named_optimizer.named_state`; tensors are shared, not copied."""
        if self.optimizer is None:
            return {}
        names = {id(p): name for name, p in self.parameters.items()}
        return renamed(self.optimizer.state_dict(), dict(enumerate(names[id(p)] for p in self._stepped())))

    def load(self, weights: Mapping[str, Tensor], saved: Mapping[str, Any] | None) -> None:
        """Take up weights and, unless None, what :meth:`state` gave: ``saved["state"]`` may lack parameters."""
        with self.lock:
            self._take_up(weights, saved)

    def _take_up(self, weights: Mapping[str, Tensor], saved: Mapping[str, Any] | None) -> None:
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(weights[name])
        if saved is not None and self.optimizer is not None:
            self._load(saved, self.optimizer)
        self.told = None  # the workers' settings are those of the checkpoint, too
        self.store.changed()

    def _load(self, saved: Mapping[str, Any], optimizer: Optimizer) -> None:
        state: dict[Tensor, dict[str, Any]] = {
            p: {key: _own(value, p) for key, value in saved["state"][name].items()}
            for name, p in self.parameters.items()
            if name in saved["state"]
        }
        if "further" in saved:  # only the optimizer knows where it goes
            by_index = {i: state[p] for i, p in enumerate(self._stepped()) if p in state}
            groups = optimizer.state_dict().get("param_groups", [])
            optimizer.load_state_dict(packed_again(saved, by_index, groups))
            return
        optimizer.state.clear()
        optimizer.state.update(state)
        optimizer.state.update(copy.deepcopy(saved.get("beside", {})))

    def _stepped(self) -> list[nn.Parameter]:
        assert self.optimizer is not None
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def _own(value: Any, parameter: Tensor) -> Any:
    """A copy of a loaded value; what has the parameter's shape goes where the parameter is."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape and value.is_floating_point():
        return value.detach().to(device=parameter.device, dtype=parameter.dtype, copy=True)
    return value.detach().clone()
