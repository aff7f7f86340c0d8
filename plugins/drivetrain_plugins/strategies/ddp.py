"""Replicas on every rank, kept equal by averaging gradients: torch's DistributedDataParallel, its buckets and overlap.

The module's step runs inside DistributedDataParallel's forward, so hooks and names of the user's module are untouched.
Beside the user's parameters travels one scalar, the *ticket*: its gradient says how much weight the ranks contributed,
so that skipped batches and losses with weights of their own (tokens) need no collective beyond the gradients'. It is
above zero where losses had weights of their own, below where they had not, and zero where no rank had a loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drivetrain.comm import choice
from drivetrain.comm.bucket_hook import ScheduledAllReduce
from drivetrain.declaration import Plan
from drivetrain.errors import TrainingError
from drivetrain.launch import Job
from drivetrain.module import TrainModule
from drivetrain.strategy import Shard, SkipStep, Step, Strategy
from drivetrain_plugins.compression.hook import CompressedAverage
from drivetrain_plugins.strategies.averaging import has_mean
from drivetrain_plugins.strategies.late_passes import refused, without
from drivetrain_plugins.strategies.sparse import refuse_sparse

# The name of the argument changed in torch 2.13.
_KNOWN = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_BROADCAST: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers": False
}
_HALF = (torch.float16, torch.bfloat16)
_WEIGHTLESS = 1e-30  # what the ticket says of a loss that weighs nothing: that there was one


class _Replica(nn.Module):
    """What DistributedDataParallel wraps: it calls whatever it is given, with the module's parameters registered."""

    def __init__(self, module: TrainModule) -> None:
        super().__init__()
        self.module = module
        first = next(p for p in module.parameters() if p.requires_grad)
        dtype = torch.float32 if first.dtype in _HALF else first.dtype.to_real()
        self.ticket = nn.Parameter(torch.zeros((), dtype=dtype, device=first.device))
        self.last_first = False

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        found = super().named_modules(*args, **kwargs)
        return iter(list(found)[::-1]) if self.last_first else found

    def forward(self, call: Callable[[Any], Any], batch: Any) -> tuple[Any, torch.Tensor]:
        # The ticket leaves with the outputs: where unused parameters are looked for it would else count as one.
        return call(batch), self.ticket.view_as(self.ticket)


class DistributedDataParallelStrategy(Strategy):
    """Exact data parallelism. With manual optimisation gradients are averaged after each ``manual_backward`` instead;
    those that a backward pass made without it, and compressed ones, per optimizer at its step.

    A topology other than the backend's own runs in a thread with a process group of its own, so that a bucket is on
    its way before the next one is ready.
    """

    _replicas: DistributedDataParallel | None = None
    _synchronised = 0
    _ticket: torch.Tensor  # as it left the forward pass at hand
    _compressed: CompressedAverage | None = None
    _all_reduce: ScheduledAllReduce | None = None  # where the topology is not the backend's own
    _algorithm = "native"
    _sent = (0, 0, 0)  # bytes, bytes uncompressed, messages of compressed gradients of former runs
    _bytes_before = _synchronised_before = 0  # of buckets that were made anew in this run
    _frozen: list[nn.Parameter]
    _completed: frozenset[int] = frozenset()  # optimizers whose gradients were averaged since the last backward
    _averaged: dict[int, tuple[Any, int]]  # of parameters by id: the gradient that the last manual backward left

    def check_module(self, module: TrainModule, plan: Plan) -> None:
        if plan.world_size > 1 and "fit" in plan.stages:
            if plan.compression != "none":
                refuse_sparse(module, f"compression={plan.compression}")
            if self.options.topology != "native":
                refuse_sparse(module, f"topology={self.options.topology}")

    def connect(self, job: Job) -> None:
        super().connect(job)
        self._all_reduce = None  # one of a job that was left, as for another Trainer of a script, is closed
        self.data = Shard(self.communicator.rank, self.communicator.world_size)

    def prepare(self, module: TrainModule, stage: str) -> None:
        super().prepare(module, stage)
        self._replicas = None
        self._averaged = {}
        self._average_buffers = stage == "fit" and self.data.size > 1
        if stage != "fit" or self.data.size == 1:
            return
        self._algorithm = self._chosen()
        self._trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._retire()
        if not module.automatic_optimization or not self._trained:
            self._broadcast(module)
            # Parameters that are frozen now may be thawed by hand.
            self._compressed = self._compression(dict(module.named_parameters()), None)
            return
        self._wrap(module, equal=False)

    def _wrap(self, module: TrainModule, equal: bool) -> None:
        """Make the buckets for the parameters that are trained now. ``equal``: replicas are, also but for buffers that
        each rank has its own of, so that nothing is broadcast."""
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._replica = _Replica(module)
        self._replica.last_first = not self.options.find_unused_parameters
        self._replicas = DistributedDataParallel(
            self._replica,
            init_sync=not equal,
            **_NO_BUFFER_BROADCAST,  # a collective per step; consensus() averages them where they are read
            bucket_cap_mb=self.options.bucket_cap_mb,
            find_unused_parameters=self.options.find_unused_parameters,
            static_graph=self.options.static_graph,
            gradient_as_bucket_view=self.options.gradient_as_bucket_view,
        )
        self._replica.last_first = False
        # Left alone, the first step has one bucket and later ones those of the order in which its gradients came. Sums
        # of three and more are rounded by their place in a bucket, so a resumed run would part from the undisturbed
        # one. The buckets are therefore made now and for good, the last layers' first, as backward comes to them.
        self._replicas.reducer._push_all_rebuilt_params()
        self._replicas.reducer._rebuild_buckets()
        self._compressed = self._compression(dict(self._trained), self._replica.ticket)
        if self._compressed is not None:
            self._replicas.register_comm_hook(self._compressed, CompressedAverage.hook)
        elif self._algorithm != "native":
            self._replicas.register_comm_hook(self._hook(), ScheduledAllReduce.hook)

    def _chosen(self) -> str:
        """The topology; the backend's own where the choice is left open and these ranks were not calibrated."""
        name: str = self.options.topology
        if name == "native":
            return name
        choice.agreed(self.communicator)  # once, where all ranks are: the hook's group has the same ranks
        return "native" if name == "auto" and not choice.knows(self.communicator) else name

    def trainable_changed(self) -> None:
        """Buckets hold the gradients of what was trained when they were made: they are made anew."""
        module = self.module
        if self._replicas is None:  # gradients are averaged per optimizer, by what requires them then
            return
        if self._compressed is not None:
            raise TrainingError(
                "parameters were frozen or thawed while gradients are compressed, and what the compressor owes belongs"
                " to the parameters that it began with: set requires_grad before fit, or compression=none."
            )
        self._bytes_before, self._synchronised_before = self._dense_traffic()
        self._synchronised, self._replicas = 0, None  # the former buckets' hooks go before the new ones come
        self._trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if self._trained:
            self._wrap(module, equal=True)

    def _hook(self) -> ScheduledAllReduce:
        if self._all_reduce is None:
            self._all_reduce = ScheduledAllReduce(self._algorithm, self.communicator)
        return self._all_reduce

    def raise_hidden(self) -> None:
        """Raise the real error of a hook's thread, which autograd hides behind its own."""
        for averaging in (self._compressed, self._all_reduce):
            if averaging is not None:
                averaging.raise_if_failed()

    def _compression(self, named: dict[str, nn.Parameter], ticket: nn.Parameter | None) -> CompressedAverage | None:
        if self.compressor is None:
            return None
        return CompressedAverage(self.compressor, self.communicator, named, exact=ticket, algorithm=self._algorithm)

    def _retire(self) -> None:
        """A new run owes nothing of the last one; what that one sent stays counted."""
        if self._compressed is not None:
            self._sent = self._compressed_traffic()
            self._compressed.close()
            self._compressed = None

    def _compressed_traffic(self) -> tuple[int, int, int]:
        before = self._sent
        if self._compressed is None:
            return before
        now = self._compressed.communicator.statistics
        dense = self._compressed.bytes_dense
        return before[0] + now.bytes_sent, before[1] + dense, before[2] + now.messages

    def _broadcast(self, module: nn.Module) -> None:
        for tensor in [*module.parameters(), *module.buffers()]:
            self.communicator.broadcast(tensor.detach())

    # -- a step -------------------------------------------------------------------------------------------------
    def forward_backward(self, step: Step) -> torch.Tensor | None:
        replicas = self._replicas
        if replicas is None:
            return super().forward_backward(step)
        if step.first:
            if self._frozen and any(p.requires_grad for p in self._frozen):
                self.trainable_changed()
                replicas = self._replicas
                assert replicas is not None
            self._replica.ticket.grad = None
            self.weight, self.weighted, self.contributed = 0.0, False, False
        with nullcontext() if step.last else replicas.no_sync():
            with self.precision.forward_context():
                loss, self._ticket = replicas(step.call, step.batch)
            step.zero_grad()
            try:
                if loss is not None:
                    step.before_backward(loss)
                    self.contributed = True
                    if step.weighted:
                        self.weight += step.share
                        self.weighted = True
                    self.backward(loss, step.share, step.last, weighted=step.weighted)
                    with refused(self.module, f"strategy={self.name}") if step.last else nullcontext():
                        step.after_backward()
                elif step.last:
                    self._join_with_zeros()
            except RuntimeError:
                self.raise_hidden()
                raise
        if step.last:
            self._refuse_missing_gradients()
            self._synchronised += 1
            if self._frozen and (thawed := [p for p in self._frozen if p.requires_grad]):
                # By the step itself (or between its micro-batches): the next one has buckets for them, this one not.
                self._average_gradients(thawed, compressed=False)
        return None if loss is None else loss.detach()

    def backward(self, loss: torch.Tensor, share: float, sync: bool, *, weighted: bool = False, **options: Any) -> None:
        if self._compressed is not None:
            self._completed = frozenset()
            scales = self.precision.scales
            self._compressed.loss_scale = self.precision.scale(torch.ones((), device=self.device)) if scales else None
        if self._replicas is None:
            super().backward(loss, share, sync, weighted=weighted, **options)
            return
        factor = share if weighted else share * self.data.size
        scaled = self.precision.scale(loss if factor == 1.0 else loss * factor)
        told = (share or _WEIGHTLESS) if weighted else -share
        self._run_backward(torch.add(scaled, self._ticket, alpha=told), options)

    def _join_with_zeros(self) -> None:
        """A rank without a loss must still take part in the reduction that the others are in."""
        if self.options.find_unused_parameters:
            (self._ticket * 0.0).backward()
            return
        touched = torch.stack([(p * 0.0).sum().to(self._replica.ticket.dtype) for _, p in self._trained]).sum()
        (touched.nan_to_num(0.0, 0.0, 0.0) + self._ticket * 0.0).backward()

    def _refuse_missing_gradients(self) -> None:
        if self.options.find_unused_parameters:
            return
        if not any(p.grad is None for _, p in self._trained):
            return
        missing = [name for name, p in self._trained if p.grad is None]
        if len(missing) == len(self._trained):
            raise TrainingError(
                f"the loss on rank {self.job.rank} depends on no parameter: return None to skip the batch, or set"
                " strategy.find_unused_parameters=true."
            )
        raise TrainingError(
            f"parameters without a gradient on rank {self.job.rank}: {', '.join(missing[:5])}"
            f"{' and more' if len(missing) > 5 else ''}: set strategy.find_unused_parameters=true, or freeze them with"
            " requires_grad=False."
        )

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, before_step: Callable[[], None]
    ) -> bool:
        if self._replicas is not None:
            before_step = without(before_step, self.module, f"strategy={self.name}")
        stepped = super().optimizer_step(optimizer, closure, before_step)
        if self._compressed is not None:
            self._compressed.settle(stepped)
        return stepped

    def reduce_gradients(self, optimizer: Optimizer, manual: bool) -> None:
        if self._compressed is not None:
            # Averaging the mean changes nothing, compressing it again would.
            if id(optimizer) in self._completed:
                return
            self._completed |= {id(optimizer)}
        if self.data.size > 1 and (manual or self._replicas is None):
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            self._average_gradients(
                parameters, needed=any(self._averaged.get(id(p)) != _mark(p.grad) for p in parameters)
            )

    def after_manual_backward(self) -> None:
        if self.data.size > 1 and self._compressed is None:
            parameters = [p for p in self.module.parameters() if p.requires_grad]
            self._average_gradients(parameters)
            self._averaged = {id(p): _mark(p.grad) for p in parameters}

    def normalise(self, optimizer: Optimizer) -> None:
        if self._replicas is None:
            super().normalise(optimizer)
            return
        weight = self._replica.ticket.grad
        assert weight is not None
        # Only a rank that itself had nothing must ask what the others had: no device is waited for otherwise.
        if not self.contributed:
            total = float(weight)
            if total == 0.0:
                raise SkipStep
            self.weighted = total > 0.0
        if self.weighted:  # also where this rank's own weight is zero: the others divide too
            self.scale_gradients(optimizer, torch.where(weight > 1e6 * _WEIGHTLESS, 1.0 / weight, 1.0))

    def _average_gradients(self, parameters: list[nn.Parameter], compressed: bool = True, needed: bool = True) -> None:
        """Average over ranks what any rank has a gradient for; a rank without one counts as zero. ``needed``: whether
        this rank's gradients are other than after the last averaging; where no rank's are, nothing else is sent."""
        present = torch.tensor([float(needed), *(float(p.grad is not None) for p in parameters)])
        wanted, *counts = self.communicator.all_reduce(present.to(self.communicator.device)).tolist()
        if not wanted:
            return
        used = [p for p, count in zip(parameters, counts, strict=True) if count]
        for p in used:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if self._compressed is not None and compressed:
            if used:
                self._compressed.average_gradients(used)
            return
        gradients = [p.grad for p in used if p.grad is not None]
        self.average(gradients)

    def average(self, tensors: list[torch.Tensor]) -> None:
        """Replace ``tensors`` by their mean over the ranks, one message per dtype."""
        for dtype in sorted({t.dtype for t in tensors}, key=str):
            group = [t for t in tensors if t.dtype == dtype]
            flat = torch.cat([t.reshape(-1) for t in group])
            self.average_flat(flat)
            offset = 0
            for t in group:
                t.copy_(flat[offset : offset + t.numel()].view_as(t))
                offset += t.numel()

    def average_flat(self, flat: torch.Tensor) -> None:
        """Manual optimisation takes the same topology, without overlap. Where gradients are compressed only buffers
        come here, for which no thread is started."""
        if self._algorithm == "native" or self.compressor is not None:
            self.communicator.all_reduce(flat, algorithm="native").div_(self.data.size)
        else:
            self._hook().submit(0, flat).wait()

    # -- evaluation and state -----------------------------------------------------------------------------------
    def evaluation_step(self, call: Callable[[Any], Any], batch: Any) -> Any:
        with self.precision.forward_context():
            return call(batch)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Each rank saw other batches, so running statistics (BatchNorm) differ: their mean is evaluated and saved."""
        if self._average_buffers:
            averaged = [b.detach() for b in self.module.buffers() if has_mean(b)]
            if averaged:
                with torch.no_grad():
                    self.average(averaged)
        yield

    _average_buffers = False

    def own_state(self) -> dict[str, Any]:
        """What this rank owes of its gradients, and the compressor's memory."""
        return {} if self._compressed is None else {"compression": self._compressed.memory.state_dict()}

    def load_own_state(self, state: dict[str, Any]) -> None:
        if self._compressed is not None and "compression" in state:
            self._compressed.memory.load_state_dict(state["compression"], self.device)

    def close(self, error: BaseException | None = None) -> None:
        for averaging in (self._compressed, self._all_reduce):
            if averaging is not None:
                averaging.close()
                if self.hangs_up(error):
                    averaging.communicator.abort()
        super().close(error)

    def exposed_communication(self) -> float | None:
        hook = self._compressed or self._all_reduce
        if hook is not None:
            return hook.exposed_seconds()
        if self._replicas is None:
            return None
        # The engine times the first ten passes and then one in a hundred, and gives means in nanoseconds.
        told = self._replicas._get_ddp_logging_data()
        if "avg_backward_comm_time" not in told:
            return None
        hidden = told["avg_backward_compute_comm_overlap_time"]
        return max(0.0, (told["avg_backward_comm_time"] - hidden) / 1e9)

    def traffic(self) -> dict[str, int]:
        """What was sent; of the backend's own all-reduce, which counts no bytes, its algorithmic volume: 2(N-1)/N of
        the gradients per step."""
        if self.compressor is not None:
            return dict(zip(("bytes_sent", "bytes_dense", "messages"), self._compressed_traffic(), strict=True))
        if self._all_reduce is not None:
            counted = self._all_reduce.communicator.statistics
            sent = counted.bytes_sent
            return {"bytes_sent": sent, "bytes_dense": sent, "messages": counted.messages}
        if self._replicas is None and not self._synchronised_before:
            return {}
        sent, messages = self._dense_traffic()
        return {"bytes_sent": sent, "bytes_dense": sent, "messages": messages}

    def _dense_traffic(self) -> tuple[int, int]:
        """Bytes and reductions of this run, with those of buckets that were made anew."""
        size = sum(p.numel() * p.element_size() for _, p in self._trained) + self._replica.ticket.element_size()
        sent = self._synchronised * size * 2 * (self.data.size - 1) // self.data.size
        return self._bytes_before + sent, self._synchronised_before + self._synchronised


def _mark(gradient: torch.Tensor | None) -> tuple[Any, int]:
    """What tells whether a gradient has been changed or replaced: its place and the changes that were made there. A
    sparse one has no place; it is taken for another each time."""
    if gradient is None:
        return None, 0
    return gradient.data_ptr() if gradient.layout is torch.strided else object(), gradient._version
