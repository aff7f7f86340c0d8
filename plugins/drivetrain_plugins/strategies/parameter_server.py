"""A parameter server (Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014).

Some ranks hold the parameters and their optimizer and never see a batch; the others compute gradients, push them and
pull weights. ``sync`` is exact; ``async`` lets every worker go at its own pace. On one host the numbers lie in memory
that all share, and messages only say so; a server steps on the device of its rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.comm.communicator import Communicator
from drivetrain.declaration import Plan
from drivetrain.errors import ConfigurationError, Interrupted, TrainingError
from drivetrain.launch import Job, job_store, signals
from drivetrain.named_optimizer import named_state, parameter_names
from drivetrain.optimizer import is_torchs
from drivetrain.strategy import Shard, SkipStep, Strategy
from drivetrain_plugins.parameter_server import staleness, states
from drivetrain_plugins.parameter_server.absent_states import keep_no_states
from drivetrain_plugins.parameter_server.board import fail, heard
from drivetrain_plugins.parameter_server.client import Client
from drivetrain_plugins.parameter_server.copies import Copies
from drivetrain_plugins.parameter_server.endpoint import Listener
from drivetrain_plugins.parameter_server.groups import as_before, plain_groups
from drivetrain_plugins.parameter_server.layout import Layout
from drivetrain_plugins.parameter_server.meeting import Roles, meet, share_memory
from drivetrain_plugins.parameter_server.pieces import Piece, cut, divide
from drivetrain_plugins.parameter_server.server import Server
from drivetrain_plugins.parameter_server.share import share_of
from drivetrain_plugins.parameter_server.window import Window
from drivetrain_plugins.parameter_server.wire import Message
from drivetrain_plugins.strategies.averaging import has_mean
from drivetrain_plugins.strategies.first_step import refuse_unlike
from drivetrain_plugins.strategies.late_passes import without
from drivetrain_plugins.strategies.new_groups import refuse_new_groups
from drivetrain_plugins.strategies.own_parts import refuse_own_parts
from drivetrain_plugins.strategies.sparse import refuse_sparse

if TYPE_CHECKING:
    from drivetrain.module import TrainModule


class ParameterServer(Strategy):
    """Workers are the first ranks, servers the last ones (``embedded``: the first worker has the server beside it)."""

    listener: Listener | None = None
    client: Client | None = None
    server: Server | None = None
    thread: threading.Thread | None = None
    held: list[dict[str, Piece]]  # what each server holds, by its key
    clock = 0  # pushes of this worker
    version: tuple[int, ...] = (0,)  # of the weights this worker has, by server
    groups = 0  # of parameters, that the servers' optimizers have
    staleness: list[list[int]] = []  # pushes, sum and largest, by server, as last heard
    fits = False  # whether the stage at hand trains
    stages = 0  # that were opened
    sent = (0, 0)  # bytes and messages of the stages before
    clip: tuple[str, float] | None = None  # what is asked of this step
    firsts: dict[int, dict[str, str]] | None = None  # what the first step changed, by server, until all have told
    whole = False  # whether this worker has the true gradients of this step
    window: Window | None = None  # memory that the server here shares
    windows: Sequence[Window | None] = ()  # memory shared with each server
    copies: Copies

    # -- coming to be -------------------------------------------------------------------------------------------
    def check_module(self, module: TrainModule, plan: Plan) -> None:
        if "fit" in plan.stages:
            refuse_sparse(module, "strategy=parameter_server")

    def connect(self, job: Job) -> None:
        super().connect(job)
        self.roles = Roles.of(job, self.options.servers, self.options.embedded)
        self.trains = self.roles.trains
        if job.world_size > 1:
            group = self.communicator.sub(range(self.roles.workers), "workers")
            self.communicator = group if group is not None else Communicator()
        self.data = Shard(job.rank if self.trains else 0, self.roles.workers)
        self.zero_copy = job.world_size > 1  # a lone worker is the caller's own process, which must be left as it was

    def prepare(self, module: TrainModule, stage: str) -> None:
        super().prepare(module, stage)
        self.fits, self.hands_on = stage == "fit", False
        self._average_buffers = self.fits and self.data.size > 1
        names = set(parameter_names(module).values())
        self.parameters = {name: p for name, p in module.named_parameters() if name in names}
        self.shapes = {name: p.shape for name, p in self.parameters.items()}
        self.stages += 1
        encrypt = self.options.encrypt
        self.encrypts = self.job.num_nodes > 1 if encrypt is None else encrypt
        self.listener, self.client = meet(
            self.job,
            self.roles,
            self.stages,
            encrypt=self.encrypts,
            largest=Layout.of({name: p.detach() for name, p in self.parameters.items()}).largest,
            zero_copy=self.zero_copy,
        )
        if self.client is not None:
            self.client.waits = self._look
        if self.listener is not None and not self.fits:
            self._start(Server(self.listener, {}, None, self.roles.workers, zero_copy=self.zero_copy))

    def build_optimizers(self, make: Callable[[], list[Optimizer]]) -> list[Optimizer]:
        optimizers = make()
        if not optimizers:
            raise ConfigurationError(
                f"{type(self.module).__name__} configures no optimizer, which the servers would step: configure one, or"
                " use strategy=ddp."
            )
        tensors = {name: p.detach() for name, p in self.parameters.items()}
        servers = len(self.roles.servers)
        self.kind = type(optimizers[0]).__name__
        self.groups = len(optimizers[0].param_groups)
        self.firsts = None if servers == 1 or is_torchs(optimizers[0]) else {}
        if servers > 1:
            refuse_own_parts(optimizers[0], f"strategy=parameter_server with servers={servers}")
        shares = divide(cut(tensors, servers, optimizers[0]), tensors, servers)
        self.held = [{piece.key: piece for piece in share} for share in shares]
        layouts = [
            Layout.of({key: piece.of(tensors[piece.name]) for key, piece in share.items()}) for share in self.held
        ]
        near = self.job.num_nodes == 1 and not self.encrypts
        self.window, windows = share_memory(self.job, self.roles, self.stages, layouts, near)
        if self.listener is not None:
            self._start(self._server(optimizers[0]))
        if self.trains:
            self._begin(layouts, windows)
            keep_no_states(optimizers[0])
        return optimizers

    def _begin(self, layouts: Sequence[Layout], windows: Sequence[Window | None]) -> None:
        """Hold the servers' weights for the first time."""
        assert self.client is not None
        sync = self.options.mode == "sync"
        looks = self.job.rank == 0 or not sync  # in ``sync`` the first worker does for all
        self.copies = Copies(self.job.rank, self.parameters, self.held, layouts, windows, looks, at_rest=sync)
        self.windows = self.client.windows = windows
        shares = [window is not None for window in windows]
        self._take(self._ask(lambda number: Message("pull", {"clock": 0, "shares": shares[number]}), "weights"))
        self.clock = 0

    def _server(self, optimizer: Optimizer) -> Server:
        """The server here: a copy of the user's optimizer, over copies of the parameters that it holds."""
        assert self.listener is not None
        tensors = {name: p.detach() for name, p in self.parameters.items()}
        own, found = share_of(optimizer, parameter_names(self.module), self.held[self.roles.index].values(), tensors)
        options = self.options
        workers, window = self.roles.workers, self.window
        names = None
        if len(self.roles.servers) > 1:
            names = {id(found[key]): piece.name for key, piece in self.held[self.roles.index].items()}
        mode, most = options.mode, options.max_staleness
        return Server(self.listener, found, own, workers, mode, most, self.zero_copy, window, names)

    def _start(self, server: Server) -> None:
        self.server = server
        if self.options.embedded:
            self.thread = threading.Thread(target=_run_beside, args=(server,), name="parameter-server", daemon=True)
            self.thread.start()

    def serve(self) -> None:
        assert self.server is not None
        self.server.waits = self._look_at_workers
        self.server.run()
        self._shut()
        signal = signals.pending()
        if signal is not None:
            raise Interrupted(signal)
        self.hands_on = job_store().check([self._ended()])

    def _look_at_workers(self) -> None:
        """Raise where none will come: where a rank has failed before it came, and its script caught that, and where
        this process is asked to stop before any is here (else they say goodbye, when they have come to a step's end).
        """
        heard(self.job)
        signal = signals.pending()
        if self.server is not None and not self.server.connections and signal is not None:
            raise Interrupted(signal)

    # -- a step -------------------------------------------------------------------------------------------------
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, before_step: Callable[[], None]
    ) -> bool:
        assert closure is not None
        closure()
        refuse_new_groups(optimizer, self.groups, self.name)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedules: the servers step
        self.clip, self.whole = None, False
        before_step = without(before_step, self.module, f"strategy={self.name}")
        if self.options.mode == "async":
            return self._push_async(optimizer, before_step)
        self.clock += 1
        assert self.client is not None
        for number in range(len(self.roles.servers)):
            self.client.send(number, self._push(number))
        skip = False
        try:
            if not self._gradients_are_read() or self._fetch_gradients():
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
        answers = self._ask(self._apply(fields), "weights")
        self._take(answers)
        return bool(answers[0].fields.get("stepped"))

    def _gradients_are_read(self) -> bool:
        """Whether anybody looks at the gradients before the step, or clips them in a way of their own."""
        hooks = self.module.trainer.hooks
        return "on_before_optimizer_step" in hooks.active or hooks.module_has("configure_gradient_clipping")

    def _fetch_gradients(self) -> bool:
        """Hold the true gradients of this step, as every worker does then; False where no worker had a loss."""
        answers = self._ask(lambda number: Message("gradients"), "gradients")
        self.copies.take_gradients(answers)
        self.whole = bool(answers[0].fields["stepping"])
        return self.whole

    def _apply(self, fields: dict[str, Any]) -> Callable[[int], Message]:
        """The word to step. The first worker adds what hooks made of the true gradients, and of the weights: as with
        replicas, all workers must have done the same."""
        changed = self.job.rank == 0 and self.copies.changed()
        gradients = self.job.rank == 0 and self.whole

        def make(number: int) -> Message:
            message = Message("apply", {**fields, "gradients": gradients, "weights": changed})
            if gradients:
                message.fields["present"] = self.copies.present(number)
                message.tensors.extend(self.copies.gradients(number))
            if changed:
                message.tensors.extend(self.copies.weights(number))
            return message

        return make

    def _push_async(self, optimizer: Optimizer, before_step: Callable[[], None]) -> bool:
        """A step on this worker's clock. It counts where this worker had nothing to give, too: schedules, log
        boundaries and ends of epochs are found by counting steps, and must fall together on all workers."""
        if self.copies.changed():
            raise TrainingError(
                f"weights were changed on rank {self.job.rank} by something else than the optimizer: with"
                " strategy.mode=async the servers' weights are the only ones; use strategy.mode=sync."
            )
        if self.weight:
            self.scale_gradients(optimizer, 1.0 / self.weight)
        try:
            if self.contributed:
                before_step()
        except SkipStep:
            self.contributed = False
        if self.clip is not None:
            Strategy.clip_gradients(self, optimizer, self.clip[1], self.clip[0])
        self.clock += 1

        def push(number: int) -> Message:
            message = self._push(number)
            message.fields.update(groups=plain_groups(optimizer), version=self.version[number])
            return message

        self._take(self._ask(push, "weights"))
        return True

    def _push(self, number: int) -> Message:
        fields = {
            "clock": self.clock,
            "present": self.copies.present(number),
            "weight": float(self.weight),
            "contributed": bool(self.contributed),
        }
        return Message("push", fields, *self.copies.push(number))

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> Tensor | None:
        """``sync``: the servers clip, by the norm of the true gradient over all of them; here the wish is noted.
        Where this worker has them all, it clips itself. ``async``: each worker clips its own."""
        if self.whole or (self.options.mode == "async" and value == float("inf")):
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
        self._look()
        return self.client.ask(make, kind)

    def _look(self) -> None:
        """Raise what the server in this process failed with, before it is asked and while it is waited for: nobody sees
        the connection to it close, for it ends with this process."""
        failed = self.server.failure if self.server is not None else None
        if failed is not None:
            what = failed if isinstance(failed, TrainingError) else f"{type(failed).__name__}: {failed}"
            where = f"the parameter server beside rank {self.job.rank}"
            raise TrainingError(f"{where} failed: {what}") from failed  # whose kind the launcher looks at

    def _take(self, answers: list[Message]) -> None:
        """Hold the weights that the servers sent."""
        if self.firsts is not None:
            self._compare(self.firsts, answers)
        self.copies.take(answers)
        self.version = tuple(answer.number("version") for answer in answers)
        self.staleness = [answer.fields["staleness"] for answer in answers]

    def _compare(self, firsts: dict[int, dict[str, str]], answers: list[Message]) -> None:
        """What the optimizer's first step changed on each server, when all have told."""
        firsts.update((number, told) for number, one in enumerate(answers) if (told := one.fields.get("first")))
        if len(firsts) == len(answers):
            self.firsts = None
            found = [firsts[number] for number in sorted(firsts)]
            way_out = "use strategy.servers=1 or strategy=ddp"
            refuse_unlike(found, self.kind, "server", "strategy=parameter_server", way_out)

    # -- evaluation and state -----------------------------------------------------------------------------------
    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Every worker holds the servers' weights, and the mean of the running statistics (BatchNorm)."""
        if self.trains and self.fits and self.client is not None:
            self._pull_together()
            if self._average_buffers and self.module.training:
                with torch.no_grad():
                    for buffer in self.module.buffers():
                        if has_mean(buffer):
                            buffer.copy_(self.communicator.all_reduce(buffer.detach().clone()) / self.data.size)
        yield

    def _pull_together(self) -> None:
        """``async``: all workers' pushes come first, then all pull the same; in ``sync`` they hold it already."""
        if self.options.mode == "async":
            self.communicator.barrier()
            self._take(self._ask(lambda number: Message("pull"), "weights"))
            self.communicator.barrier()  # nobody pushes again before all have pulled

    def state_dict(self, optimizers: list[Optimizer]) -> dict[str, Any]:
        # After a fit its servers are gone, and the states with them.
        packed = [named_state(self.module, one) for one in optimizers] if self.fits and self.client is not None else []
        if packed:
            answers = self._ask(lambda number: Message("state"), "state")
            beside, settings = states.kept_beside(answers, optimizers[0])
            packed[0] |= {"state": states.whole(answers, self.held, self.shapes), **beside}
            for group, changed in zip(packed[0]["param_groups"], settings, strict=True):
                group.update({key: as_before(value, group.get(key)) for key, value in changed.items()})
        return {"module": self.module.state_dict(), "optimizers": packed, "precision": self.precision.state_dict()}

    def load_state_dict(self, state: dict[str, Any], optimizers: list[Optimizer], strict: bool = True) -> None:
        self.module.load_state_dict(state["module"], strict=strict)
        saved = state.get("optimizers", [])
        for optimizer, one in zip(optimizers, saved, strict=False):
            for group, values in zip(optimizer.param_groups, one["param_groups"], strict=True):
                group.update({key: value for key, value in values.items() if key != "params"})
        if self.server is not None and self.fits:
            share = self.held[self.roles.index]
            weights = {key: piece.of(self.parameters[piece.name].detach()) for key, piece in share.items()}
            own = [{**one, "state": states.part(one["state"], share, self.shapes)} for one in saved[:1]]
            self.server.load(weights, own[0] if own else None)
        elif self.trains and self.fits and self.clock and not self.options.embedded:
            self._load_there(saved[0] if saved else None)
        if self.trains and self.fits:
            self.copies.remember()
        if self.options.embedded and self.fits:
            self.communicator.barrier()  # nobody may push before the server beside the first worker has taken it up

    def _load_there(self, saved: dict[str, Any] | None) -> None:
        """Servers that are at work do not come to what is loaded here: the first worker sends it."""
        self.communicator.barrier()  # nobody pushes before it is taken up, nor (``async``) after it what is older
        if self.job.rank == 0:

            def load(number: int) -> Message:
                tensors = self.copies.weights(number)
                part = None
                if saved is not None:
                    part = {**saved, "state": states.part(saved["state"], self.held[number], self.shapes)}
                return Message("load", states.packed(part, tensors), tensors)

            self._take(self._ask(load, "weights"))
        self.communicator.barrier()

    def own_state(self) -> dict[str, Any]:
        return {"clock": self.clock}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Clocks only tell pushes apart, and the servers' begin anew."""

    def traffic(self) -> dict[str, Any]:
        sent, messages = self.sent
        stale = staleness.summary(self.staleness) if self.options.mode == "async" and self.staleness else {}
        for end in (self.client, self.server):
            if end is not None:
                sent, messages = sent + end.bytes_sent, messages + end.messages
        return {"bytes_sent": sent, "bytes_dense": sent, "messages": messages, **stale}

    def finish(self) -> None:
        """What the servers end with is what the caller's module gets; after this they are gone."""
        if self.fits:
            self._pull_together()
        self.hands_on = self.roles.workers < self.job.world_size
        if self.hands_on and self.job.rank == 0:
            job_store().set(self._ended(), "1")  # before the goodbye, after which a server looks
        self._shut()

    def _ended(self) -> str:
        """Where the first worker says that the workers have come to the stage's end."""
        return f"ended_{self.stages}"

    def close(self, error: BaseException | None = None) -> None:
        orderly = error is None or isinstance(error, Interrupted)
        if error is not None and not orderly:  # who is stopped leaves as at the end, and servers wait for the others
            fail(self.job, error)
        if self.server is not None:
            self.server.stopping = error is not None
        # Without a goodbye the servers know that this worker failed, and end too.
        self._shut(self.job.timeout if error is None else 1.0, goodbye=orderly)
        super().close(error)

    def _shut(self, timeout: float | None = None, *, goodbye: bool = True) -> None:
        """Say goodbye, let the server beside this worker (if any) end, close all connections."""
        if self.client is not None and goodbye:
            self.client.goodbye()
        if self.thread is not None:
            self.thread.join(timeout if timeout is not None else self.job.timeout)
        self._unshare(at_rest=goodbye or self.job.world_size == 1)
        traffic = self.traffic()
        self.sent = (traffic["bytes_sent"], traffic["messages"])
        for end in (self.client, self.listener):
            if end is not None:
                end.close()
        self.client = self.listener = self.server = self.thread = None

    def _unshare(self, at_rest: bool) -> None:
        """Where something failed a GPU may wait for ever for another rank: the memory then goes with the process."""
        if not at_rest:
            return
        if self.windows:
            self.copies.close()
        for window in (self.window, *self.windows):
            if window is not None:
                window.close()
        self.window, self.windows = None, ()


def _run_beside(server: Server) -> None:
    """In a thread: the server keeps what it fails with, which its worker raises at the next request."""
    with suppress(Exception):
        server.run()
