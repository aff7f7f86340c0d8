"""Strategy: how the ranks hold the model and agree on its update.

The loops call the entries below in the order of this table and know nothing else of a strategy. The defaults are a
complete single-process strategy; a family overrides only what it bends.

===  ==============================  ===================================================  ==========================
 #   entry                           called                                               default
===  ==============================  ===================================================  ==========================
 0   ``check_module(module, plan)``  before any process starts                            nothing
     ``check_data(loader)``          the same, of a loader at hand; fit only              nothing
 1   ``connect(job)``                once, before the module is set up                    one rank, no group
 2   ``serve()``                     instead of the loop where ``trains`` is false        an error
 3   ``init_context()``              around ``configure_model``                           the precision's
 4   ``prepare(module, stage)``      before each stage                                    move to the device
 5   ``build_optimizers(make)``      fit only, after ``prepare``                          ``make()``
 -   ``trainable_changed()``         when an epoch's start hooks froze or thawed any      refused for several ranks
 6   ``run_epoch(run, source)``      each epoch                                           ``run(source)``
 7   ``forward_backward(step)``      each micro-batch; the last within the closure        call, zero_grad, backward
 8   ``backward(loss, share, sync)`` by 7 and by ``manual_backward``                      scaled ``loss.backward()``
 9   ``optimizer_step(...)``         each optimizer step, manual ones too                 closure, 10, unscale, step
10   ``reduce_gradients(...)``       by 9, after the last backward                        nothing
11   ``clip_gradients(...)``         by the module's clipping hook                        torch's
12   ``after_step(n)``               when 9 stepped                                       nothing
13   ``evaluation_step(call, b)``    each evaluation and prediction batch                 ``call(b)``
14   ``consensus()``                 around validation, checkpoint, export                nothing
15   ``gather(vector)``              log boundaries, epoch ends                           the communicator's
16   ``state_dict()`` and back       checkpoints and hand-over; portable, no I/O          plain tensors
17   ``finish()``                    where ``trains``, when a stage's loop has ended      nothing
18   ``close(error)``                always, last; no collective after an error           leave the group
===  ==============================  ===================================================  ==========================

Launching, checkpoint files, samplers, schedulers, logging and timing are not a strategy's concern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.optim import Optimizer

from drivetrain.comm.communicator import Communicator
from drivetrain.comm.world import hang_up
from drivetrain.declaration import Plan, Support
from drivetrain.errors import Interrupted, TrainingError
from drivetrain.launch import Job, destroy_process_group, init_process_group
from drivetrain.named_optimizer import load_named_state, named_state
from drivetrain.optimizer import calls_closure_once
from drivetrain.precision import NO_CONTEXT, Precision
from drivetrain.strategy_view import StrategyView

if TYPE_CHECKING:
    from drivetrain.compressor import Compressor
    from drivetrain.module import TrainModule


@dataclass(frozen=True)
class Shard:
    """Which part of every global batch this rank reads: part ``rank`` of ``size``.

    ``lockstep``: every rank must take part in every forward pass, in evaluation too (sharded parameters).
    """

    rank: int = 0
    size: int = 1
    lockstep: bool = False


class Step(Protocol):
    """One micro-batch on its way through ``forward_backward``.

    Attributes:
        batch: this rank's part, on the device.
        index: ``batch_idx`` of the epoch.
        share: this rank's samples over the samples of the whole window; the shares of all ranks and micro-batches of
            a window sum to one. Known after ``call`` where ``weighted``.
        weighted: whether the module gave the loss's weight itself (tokens); ``share`` is then that weight, and the
            gradients are divided by the window's total weight when they are complete.
        first: whether this is the window's first micro-batch.
        last: whether this is the window's last micro-batch, after which gradients must be complete.
        whole: the detached loss of the whole batch, for who sets it where ``call`` had pieces of the batch, or another
            rank called it; what ``on_train_batch_end`` is given of the step.
    """

    batch: Any
    index: int
    share: float
    weighted: bool
    first: bool
    last: bool
    whole: torch.Tensor | None

    def call(self, batch: Any, fraction: float = 1.0) -> torch.Tensor | None:
        """The module's ``training_step``: the loss, a mean over the samples of ``batch``; None to skip the batch.
        A schedule that cuts the batch calls it for each piece, with the piece's ``fraction`` of the samples."""

    def zero_grad(self) -> None:
        """The hooks around zeroing; does something on the window's first micro-batch only."""

    def before_backward(self, loss: torch.Tensor) -> None: ...

    def after_backward(self) -> None: ...


class Run(Protocol):
    """The batch loop of an epoch as ``run_epoch`` gets it."""

    def __call__(self, source: Iterable[Any], *, inner: bool = False) -> None:
        """Train on every micro-batch of ``source``. ``inner``: a client's own steps, which count neither as global
        steps nor for schedules."""

    def outer(self, samples: int, last: bool = True) -> None:
        """Count one global step (a round) after the inner steps since the last one, of ``samples`` samples on all
        ranks; ``last``: of the epoch. Every training rank calls it, also those that had no inner step."""


class SkipStep(Exception):
    """Raised within ``optimizer_step`` on every rank alike: leave parameters and optimizer state as they are."""


class Strategy(StrategyView):
    """A single process on one device; the base of all others.

    Attributes:
        name: as it is registered.
        job: this worker's place.
        device: where the module computes.
        communicator: the ranks that train (and checkpoint) together.
        everyone: all ranks of the job, those that serve too.
        data: the part of each batch that this rank reads.
        trains: whether this rank runs the loop.
        hands_on: whether those that ran it to its end tell those that served what came of it; the same on all ranks.
        predicts: whether predictions made here are handed over (not where other ranks make the same or the only ones).
        counts: whether what is logged here counts (not where another rank logs the same).
        logs: whether steps come to their end here, where they log (not on the first ranks of a pipeline).
        alike: groups of ranks that all are given the same samples and call the same hooks: of what several of a group
            log under one name, the last one's counts; nothing where each has samples of its own.
        holds_part: whether this rank's module has part of the parameters only.
        precision: the number format, composed here.
        compressor: what makes gradients smaller before they travel, composed here; None for nothing.
    """

    name = ""

    def __init__(self, options: Any, support: Support) -> None:
        self.options = options
        self.support = support
        self.precision = Precision()
        self.compressor: Compressor | None = None
        self.job = Job()
        self.device = torch.device("cpu")
        self.communicator = self.everyone = Communicator()
        self.data = Shard()
        self.trains = True
        self.hands_on = False
        self.predicts = True
        self.counts = True
        self.logs = True
        self.alike: Sequence[Sequence[int]] = ()
        self.holds_part = False
        self.module: TrainModule

    # -- coming to be -------------------------------------------------------------------------------------------
    def check_module(self, module: TrainModule, plan: Plan) -> None:
        """Raise :class:`ConfigurationError` where ``module`` cannot be trained so. Called before workers start, with
        what ``__init__`` built: what ``configure_model`` builds is seen by ``prepare`` first."""

    def check_data(self, loader: Any) -> None:
        """Raise :class:`ConfigurationError` where ``loader`` cannot be trained on so. Called before workers start with
        a loader given to ``fit``, and on every rank with what the hooks made."""

    def connect(self, job: Job) -> None:
        """Set ``job``, ``device``, ``communicator``, ``everyone``, ``data`` and ``trains``; join the process group."""
        self.job = job
        self.planned_device = None
        if job.accelerator == "cuda":
            self.device = torch.device("cuda", job.gpu)
            torch.cuda.set_device(self.device)
        init_process_group(job, device=self.device)
        if job.world_size > 1:
            exchange = self.device if job.backend == "nccl" else torch.device("cpu")
            patience = timedelta(seconds=job.timeout)
            self.communicator = self.everyone = Communicator(torch.distributed.group.WORLD, exchange, timeout=patience)
        self.precision.connect(self.device)

    def serve(self) -> None:
        """Do this rank's work until the training ranks are done."""
        raise RuntimeError(f"{type(self).__name__} has no ranks that serve")

    @contextmanager
    def init_context(self) -> Iterator[None]:
        """Around ``configure_model``."""
        with self.precision.init_context():
            yield

    def prepare(self, module: TrainModule, stage: str) -> None:
        """Hold ``module`` as this strategy does, for ``stage``: fit, validate, test or predict."""
        self.module = module
        self._backward = module.backward if module.overrides_backward else None
        self.precision.convert_module(module)
        module.to(self.device)

    def build_optimizers(self, make: Callable[[], list[Optimizer]]) -> list[Optimizer]:
        """The optimizers that the loop steps, one for each that ``make()`` (the module's configuration) returns."""
        return make()

    def trainable_changed(self) -> None:
        """Parameters were frozen or thawed since ``prepare``; every rank comes here at the same epoch's start.

        Raises:
            TrainingError: this strategy has laid out its parameters for good.
        """
        if self.communicator.world_size > 1 and not self.support.thaws:
            raise TrainingError(
                f"parameters were frozen or thawed while strategy={self.name} trains, which has laid them out when"
                " training began: set requires_grad before fit, or use strategy=ddp, ring or single."
            )

    # -- an epoch and a step ------------------------------------------------------------------------------------
    def run_epoch(self, run: Run, source: Iterable[Any]) -> None:
        run(source)

    def forward(self, call: Callable[[Any], Any], batch: Any) -> Any:
        """``call(batch)`` under the precision's context; the seam where a replicated engine wraps the forward pass."""
        context = self.precision.forward_context()
        if context is NO_CONTEXT:
            return call(batch)
        with context:
            return call(batch)

    def forward_backward(self, step: Step) -> torch.Tensor | None:
        """Forward, zero the gradients at the window's start, backward. Returns the detached loss, None if skipped."""
        if step.first:
            self.weight, self.weighted, self.contributed = 0.0, False, False
        loss = self.forward(step.call, step.batch)
        step.zero_grad()
        if loss is None:
            return None
        step.before_backward(loss)
        self.contributed = True
        if step.weighted:
            self.weight += step.share
            self.weighted = True
        self.backward(loss, step.share, step.last, weighted=step.weighted)
        step.after_backward()
        return loss.detach()

    def without_batch(self) -> None:
        """Called instead of ``training_step``, within the forward pass, where this rank's loader gave None and other
        ranks may have a batch: take part in what they exchange in theirs."""

    weight = 0.0  # of the window so far, where the module weights its losses itself
    weighted = False  # whether it did in this window; this rank's own weight may still be zero
    contributed = True  # whether any micro-batch of the window gave a loss

    def backward(self, loss: torch.Tensor, share: float, sync: bool, *, weighted: bool = False, **options: Any) -> None:
        """Accumulate the gradient of ``loss * share``, summed over ranks; engines that average get it times their
        size, except for ``weighted`` losses, whose gradients :meth:`normalise` divides."""
        factor = share if weighted else share * self.data.size
        self._run_backward(self.precision.scale(loss if factor == 1.0 else loss * factor), options)

    def after_manual_backward(self) -> None:
        """A backward pass of a module that optimises by hand is over. What the module does with its gradients before
        it steps (clipping them, looking at their norm) it does to global ones where replicas are kept alike."""

    _backward: Callable[..., None] | None = None  # the module's own, where it has one

    def _run_backward(self, loss: torch.Tensor, options: dict[str, Any]) -> None:
        if self._backward is None:
            loss.backward(**options)
        else:
            self._backward(loss, **options)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, before_step: Callable[[], None]
    ) -> bool:
        """Run ``closure`` (None: gradients are there, manual optimisation), complete the gradients, call
        ``before_step`` (hooks, clipping) on their true values and step. False: the step was skipped on all ranks."""

        try:
            once = calls_closure_once(optimizer) or self.precision.scales or not self.support.closures
            if closure is None or once:
                if closure is not None:
                    closure()
                self._complete(optimizer, before_step)
                return self._step(optimizer, None)

            def complete() -> Any:
                with torch.enable_grad():
                    result = closure()
                self._complete(optimizer, before_step)
                return result

            return self._step(optimizer, complete)
        except SkipStep:
            return False

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        """The optimizer's own step, and nothing else of the loop unless it is given a closure."""
        return self.precision.step(optimizer, closure)

    def _complete(self, optimizer: Optimizer, before_step: Callable[[], None]) -> None:
        """After the last backward: the gradients' global and true values, then hooks and clipping."""
        manual = not self.module.automatic_optimization
        self.reduce_gradients(optimizer, manual)
        if not manual:
            self.normalise(optimizer)
            if not self.contributed:  # what there is came from ranks that had a loss to scale
                self.precision.scale(torch.zeros((), device=self.device))
        self.precision.unscale(optimizer)
        before_step()

    def reduce_gradients(self, optimizer: Optimizer, manual: bool) -> None:
        """Bring the gradients that ``optimizer`` reads to their global value, where ``backward`` did not."""

    def normalise(self, optimizer: Optimizer) -> None:
        """Divide by the window's total weight where the module weights its losses; skip a window without any loss."""
        if not self.contributed:
            raise SkipStep
        if self.weight:
            self.scale_gradients(optimizer, 1.0 / self.weight)

    def scale_gradients(self, optimizer: Optimizer, factor: float | torch.Tensor) -> None:
        """Multiply every gradient that ``optimizer`` reads."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> torch.Tensor | None:
        """Clip by the global ``"norm"`` (returned) or each entry by ``"value"``."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if algorithm == "value":
            nn.utils.clip_grad_value_(parameters, value)
            return None
        return nn.utils.clip_grad_norm_(parameters, value)

    def after_step(self, step: int) -> None:
        """After optimizer step number ``step`` (from 1)."""

    # -- evaluation, metrics, state -----------------------------------------------------------------------------
    def evaluation_step(self, call: Callable[[Any], Any], batch: Any) -> Any:
        return self.forward(call, batch)

    def consensus(self) -> AbstractContextManager[Any]:
        """While it lasts the module holds the weights that are validated and saved."""
        return _nothing()

    def gather(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Every training rank's fp64 ``vector`` (all of one length), in rank order, on every rank."""
        return self.communicator.all_gather(vector)

    def state_dict(self, optimizers: list[Optimizer]) -> dict[str, Any]:
        """``{"module": {name: tensor}, "optimizers": [{"state": {name: {...}}, "param_groups": [...]}]}`` with
        parameters by their name in the module: portable between strategies and world sizes."""
        return {
            "module": self.module.state_dict(),
            "optimizers": [named_state(self.module, optimizer) for optimizer in optimizers],
            "precision": self.precision.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], optimizers: list[Optimizer], strict: bool = True) -> None:
        """Restore what :meth:`state_dict` of any strategy gave."""
        self.module.load_state_dict(state["module"], strict=strict)
        for optimizer, saved in zip(optimizers, state.get("optimizers", []), strict=False):
            self.load_optimizer(optimizer, saved)
        if "precision" in state:
            self.precision.load_state_dict(state["precision"])

    def load_optimizer(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """Restore one of the optimizers of :meth:`state_dict`, of any strategy, where they are stepped as they are."""
        load_named_state(self.module, optimizer, saved)

    def own_state(self) -> dict[str, Any]:
        """What belongs to this rank alone (error feedback, clocks), as plain data and tensors; lost when the world
        size changes, but for :meth:`load_first_state`."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`own_state` gave on the same rank. It may be of another strategy, or of an older
        version."""

    def load_first_state(self, state: dict[str, Any]) -> None:
        """Called instead where the world size has changed, with the first rank's: take what is alike on all ranks."""

    def traffic(self) -> dict[str, int]:
        """Bytes and messages of the gradients: ``bytes_sent``, ``bytes_dense`` (uncompressed), ``messages``."""
        return {}

    def exposed_communication(self) -> float | None:
        """Seconds of a backward pass in which this rank only waited for gradients, mean since training began; None
        where the engine does not tell."""
        return None

    def finish(self) -> None:
        """The stage's loop has ended in order: ranks that serve can be let go."""

    def give_back(self, optimizers: list[Optimizer]) -> None:
        """A lone worker's stage and its last hooks are over: the caller has the module, and its optimizers' states, on
        the host again, as where other processes trained it; the device's memory is free."""
        if self.device.type == "cpu":
            return
        self.module.cpu()
        for optimizer in optimizers:
            for key, state in optimizer.state.items():
                optimizer.state[key] = apply_to_collection(state, torch.Tensor, lambda value: value.cpu())

    def hangs_up(self, error: BaseException | None) -> bool:
        """Whether connections are to be closed at once, for other ranks may wait: a script that catches ``error`` goes
        on, where a worker of ours ends; of a signal all leave together."""
        return error is not None and self.job.origin != "local" and not isinstance(error, Interrupted)

    def close(self, error: BaseException | None = None) -> None:
        """Give everything back. After an error no collective may run: the other ranks may be gone."""
        self.communicator.close()
        if self.job.world_size > 1:
            if self.hangs_up(error):
                hang_up()
            destroy_process_group(failed=error is not None)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
