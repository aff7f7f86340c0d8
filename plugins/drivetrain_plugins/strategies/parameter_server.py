"""A parameter server (Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014).

Some ranks hold the parameters and their optimizer and never see a batch; the others compute gradients, push them and
pull weights. ``sync`` is exact; ``async`` lets every worker go at its own pace.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.comm.communicator import Communicator
from drivetrain.errors import Interrupted, TrainingError
from drivetrain.launch import Job, signals
from drivetrain.named_optimizer import named_state, parameter_names
from drivetrain.strategy import Shard, SkipStep, Strategy
from drivetrain_plugins.parameter_server.board import Board
from drivetrain_plugins.parameter_server.client import Client
from drivetrain_plugins.parameter_server.endpoint import Keys, Listener, address_of_this_host
from drivetrain_plugins.parameter_server.layout import Layout, divide
from drivetrain_plugins.parameter_server.server import Server
from drivetrain_plugins.parameter_server.wire import Message

if TYPE_CHECKING:
    from drivetrain.module import TrainModule


class ParameterServer(Strategy):
    """Workers are the first ranks, servers the last ones (``embedded``: the first worker has the server beside it)."""

    listener: Listener | None = None
    client: Client | None = None
    server: Server | None = None
    thread: threading.Thread | None = None
    held: list[list[str]]  # names of each server's parameters
    clock = 0  # pushes of this worker
    version: tuple[int, ...] = (0,)  # of the weights this worker has, by server
    staleness: list[list[int]] = []  # pushes, sum and largest, by server, as last heard
    stages = 0  # that were opened
    sent = (0, 0)  # bytes and messages of the stages before
    clip: tuple[str, float] | None = None  # what is asked of this step

    # -- coming to be -------------------------------------------------------------------------------------------
    def connect(self, job: Job) -> None:
        super().connect(job)
        options = self.options
        self.count = 1 if options.embedded else options.servers
        self.workers = job.world_size if options.embedded else job.world_size - self.count
        self.trains = job.rank < self.workers
        self.index = 0 if options.embedded else job.rank - self.workers  # of the server here, where there is one
        serves = job.rank == 0 if options.embedded else not self.trains
        everyone = self.communicator
        if job.world_size > 1:
            group = everyone.sub(range(self.workers), "workers")
            self.communicator = group if group is not None else Communicator()
        self.data = Shard(job.rank if self.trains else 0, self.workers)
        self.serves = serves
        self.zero_copy = job.world_size > 1  # a lone worker is the caller's own process, which must be left as it was

    def _open(self, job: Job) -> None:
        """Meet for a stage through the job's store: servers leave their address there, and keys where connections are
        secured."""
        serves = self.serves
        self.stages += 1
        encrypt = job.num_nodes > 1 if self.options.encrypt is None else self.options.encrypt
        store = Board(job, self.stages)
        keys = Keys.new() if encrypt else None
        if keys is not None and self.trains:
            store.set(f"key of worker {job.rank}", keys.public.decode())
        if serves:
            own = Keys.new() if keys is not None else None
            allowed = {store.get(f"key of worker {rank}").encode() for rank in range(self.workers)} if own else None
            host = "127.0.0.1" if job.num_nodes == 1 else address_of_this_host(job.master_addr)
            self.listener = Listener(host, own, allowed)
            store.set(f"key of server {self.index}", own.public.decode() if own is not None else "")
            store.set(f"server {self.index}", self.listener.address)
        if self.trains:
            addresses = [store.get(f"server {number}") for number in range(self.count)]
            servers = [store.get(f"key of server {number}").encode() for number in range(self.count)] if keys else None
            self.client = Client(addresses, job.rank, job.timeout, keys, servers, self.zero_copy)

    def prepare(self, module: TrainModule, stage: str) -> None:
        super().prepare(module, stage)
        self.fits = stage == "fit"
        self._average_buffers = self.fits and self.data.size > 1
        names = set(parameter_names(module).values())
        self.parameters = {name: p for name, p in module.named_parameters() if name in names}
        self.held = divide({name: p.numel() for name, p in self.parameters.items()}, self.count)
        self.layouts = [Layout.of({name: self.parameters[name].detach() for name in share}) for share in self.held]
        self._open(self.job)
        if self.listener is not None and not self.fits:
            self._start(Server(self.listener, {}, None, self.workers, zero_copy=self.zero_copy))

    def build_optimizers(self, make: Callable[[], list[Optimizer]]) -> list[Optimizer]:
        optimizers = make()
        if self.listener is not None:
            self._start(self._server(optimizers[0]))
        if self.trains:
            self._take(self._ask(lambda number: Message("pull", {"clock": 0}), "weights"))
            self.clock = 0
        return optimizers

    def _server(self, optimizer: Optimizer) -> Server:
        """The server here: a copy of the user's optimizer, over copies of the parameters that it holds."""
        assert self.listener is not None
        own = copy.deepcopy(optimizer)
        names = parameter_names(self.module)
        mine = set(self.held[self.index])
        found: dict[str, torch.nn.Parameter] = {}
        for group, original in zip(own.param_groups, optimizer.param_groups, strict=True):
            pairs = [(names[id(p)], q) for p, q in zip(original["params"], group["params"], strict=True)]
            found |= {name: q for name, q in pairs if name in mine}
            group["params"] = [q for name, q in pairs if name in mine]
        for name in mine - found.keys():  # parameters that no optimizer steps are given out as they are
            found[name] = torch.nn.Parameter(self.parameters[name].detach().clone(), requires_grad=False)
        options = self.options
        return Server(self.listener, found, own, self.workers, options.mode, options.max_staleness, self.zero_copy)

    def _start(self, server: Server) -> None:
        self.server = server
        if self.options.embedded:
            self.thread = threading.Thread(target=server.run, name="parameter-server", daemon=True)
            self.thread.start()

    def serve(self) -> None:
        assert self.server is not None
        self.server.run()
        self._shut()
        signal = signals.pending()
        if signal is not None:
            raise Interrupted(signal)

    # -- a step -------------------------------------------------------------------------------------------------
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, before_step: Callable[[], None]
    ) -> bool:
        assert closure is not None
        closure()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedules: the servers step
        self.clip = None
        if self.options.mode == "async":
            return self._push_async(optimizer, before_step)
        self.clock += 1
        assert self.client is not None
        for number in range(self.count):
            self.client.send(number, self._gradients(number))
        skip = False
        try:
            before_step()
        except SkipStep:  # on every worker alike: the servers wait for a word all the same
            skip = True
        factor = bound = None
        if self.clip is not None:
            algorithm, value = self.clip
            if algorithm == "value":
                bound = float(value)
            else:
                factor = min(1.0, value / (self._norm() + 1e-6))
        groups = plain_groups(optimizer)
        fields = {"clock": self.clock, "skip": skip, "factor": factor, "bound": bound, "groups": groups}
        answers = self._ask(lambda number: Message("apply", dict(fields)), "weights")
        self._take(answers)
        return bool(answers[0].fields.get("stepped"))

    def _push_async(self, optimizer: Optimizer, before_step: Callable[[], None]) -> bool:
        """A step on this worker's clock. It counts where this worker had nothing to give, too: schedules, log
        boundaries and ends of epochs are found by counting steps, and must fall together on all workers."""
        try:
            if self.contributed:
                before_step()
        except SkipStep:
            self.contributed = False
        if self.weight:
            self.scale_gradients(optimizer, self.data.size / self.weight)
        if self.clip is not None:
            Strategy.clip_gradients(self, optimizer, self.clip[1], self.clip[0])
        self.clock += 1

        def push(number: int) -> Message:
            message = self._gradients(number)
            message.fields.update(groups=plain_groups(optimizer), version=self.version[number])
            return message

        self._take(self._ask(push, "weights"))
        return True

    def _gradients(self, number: int) -> Message:
        layout = self.layouts[number]
        gradients = {name: self.parameters[name].grad for name in layout.names}
        fields = {
            "clock": self.clock,
            "present": [gradients[name] is not None for name in layout.names],
            "weight": float(self.weight),
            "contributed": bool(self.contributed),
        }
        return Message("push", fields, layout.flatten(gradients))

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> Tensor | None:
        """``sync``: the servers clip, by the norm of the true gradient over all of them; here the wish is noted.
        ``async``: each worker clips its own."""
        if self.options.mode == "async" and value == float("inf"):
            return super().clip_gradients(optimizer, value, algorithm)
        if value != float("inf"):
            self.clip = (algorithm, value)
        if self.options.mode == "async" or algorithm == "value":
            return None
        return torch.tensor(self._norm())

    def _norm(self) -> float:
        answers = self._ask(lambda number: Message("norm"), "norm")
        return float(sum(float(answer.fields["square"]) for answer in answers) ** 0.5)

    def normalise(self, optimizer: Optimizer) -> None:
        """The servers know the weights of all workers, and whether any had a loss."""

    def _ask(self, make: Callable[[int], Message], kind: str) -> list[Message]:
        assert self.client is not None
        failed = self.server.failure if self.server is not None else None
        if failed is not None:
            raise TrainingError(f"the parameter server beside rank {self.job.rank} failed: {failed}") from failed
        return self.client.ask(make, kind)

    def _take(self, answers: list[Message]) -> None:
        """Hold the weights that the servers sent."""
        with torch.no_grad():
            for layout, answer in zip(self.layouts, answers, strict=True):
                for name, value in layout.split(answer.tensors).items():
                    self.parameters[name].copy_(value)
        self.version = tuple(answer.number("version") for answer in answers)
        self.staleness = [answer.fields["staleness"] for answer in answers]

    # -- evaluation and state -----------------------------------------------------------------------------------
    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Every worker holds the servers' weights, and the mean of the running statistics (BatchNorm)."""
        if self.trains and self.fits and self.client is not None:
            self._pull_together()
            if self._average_buffers and self.module.training:
                with torch.no_grad():
                    for buffer in self.module.buffers():
                        if buffer.is_floating_point():
                            buffer.copy_(self.communicator.all_reduce(buffer.detach().clone()) / self.data.size)
        yield

    def _pull_together(self) -> None:
        """``async``: all workers' pushes come first, then all pull the same; in ``sync`` they hold it already."""
        if self.options.mode == "async":
            self.communicator.barrier()
            self._take(self._ask(lambda number: Message("pull"), "weights"))
            self.communicator.barrier()  # nobody pushes again before all have pulled

    def state_dict(self, optimizers: list[Optimizer]) -> dict[str, Any]:
        packed = [named_state(self.module, optimizer) for optimizer in optimizers]
        if packed:
            packed[0]["state"] = {}
            for answer in self._ask(lambda number: Message("state"), "state"):
                tensors = iter(answer.tensors)
                for name, key, value in answer.fields["entries"]:
                    packed[0]["state"].setdefault(name, {})[key] = next(tensors) if value is None else value[0]
        return {"module": self.module.state_dict(), "optimizers": packed, "precision": self.precision.state_dict()}

    def load_state_dict(self, state: dict[str, Any], optimizers: list[Optimizer], strict: bool = True) -> None:
        self.module.load_state_dict(state["module"], strict=strict)
        saved = state.get("optimizers", [])
        for optimizer, one in zip(optimizers, saved, strict=False):
            for group, values in zip(optimizer.param_groups, one["param_groups"], strict=True):
                group.update({key: value for key, value in values.items() if key != "params"})
        if self.server is not None and self.fits:
            weights = {name: p.detach() for name, p in self.parameters.items()}
            self.server.load(weights, saved[0]["state"] if saved else None)
        if self.options.embedded and self.fits:
            self.communicator.barrier()  # nobody may push before the server beside the first worker has taken it up

    def own_state(self) -> dict[str, Any]:
        return {"clock": self.clock}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Clocks only tell pushes apart, and the servers' begin anew."""

    def traffic(self) -> dict[str, Any]:
        sent, messages = self.sent
        for end in (self.client, self.server):
            if end is not None:
                sent, messages = sent + end.bytes_sent, messages + end.messages
        return {"bytes_sent": sent, "bytes_dense": sent, "messages": messages, **self._staleness()}

    def _staleness(self) -> dict[str, Any]:
        """Of all workers' pushes, over all servers: optimizer steps between the weights that a gradient was computed
        with and those it was applied to."""
        if self.options.mode != "async" or not self.staleness:
            return {}
        pushes, total = (sum(one[i] for one in self.staleness) for i in (0, 1))
        largest = max(one[2] for one in self.staleness)
        # Every push has a part for each server.
        return {
            "pushes": pushes // self.count,
            "staleness_mean": total / pushes if pushes else 0.0,
            "staleness_max": largest,
        }

    def finish(self) -> None:
        """What the servers end with is what the caller's module gets; after this they are gone."""
        if self.fits:
            self._pull_together()
        self._shut()

    def close(self, error: BaseException | None = None) -> None:
        if self.server is not None:
            self.server.stopping = error is not None
        self._shut(1.0 if error is not None else self.job.timeout)
        super().close(error)

    def _shut(self, timeout: float | None = None) -> None:
        """Say goodbye, let the server beside this worker (if any) end, close all connections."""
        if self.client is not None:
            self.client.goodbye()
        if self.thread is not None:
            self.thread.join(timeout if timeout is not None else self.job.timeout)
        traffic = self.traffic()
        self.sent = (traffic["bytes_sent"], traffic["messages"])
        for end in (self.client, self.listener):
            if end is not None:
                end.close()
        self.client = self.listener = self.server = self.thread = None


def plain_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of every parameter group that a server needs to step as this worker would: the learning rate of
    now, and what else a schedule may change."""
    return [
        {key: _plain(value) for key, value in group.items() if key != "params" and _is_plain(_plain(value))}
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value
    return list(value) if isinstance(value, tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
