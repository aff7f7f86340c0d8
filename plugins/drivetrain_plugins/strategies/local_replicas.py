"""Replicas that step by themselves and are brought together now and then: what all such strategies share.

Each rank holds the whole module and steps on its own part of the batch. Where a strategy is ``synchronous`` gradients
are averaged before each step instead, so that replicas stay equal whatever the optimizer, clipping or loss scale.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from drivetrain.declaration import Plan
from drivetrain.errors import MisuseError
from drivetrain.launch import Job
from drivetrain.module import TrainModule
from drivetrain.named_optimizer import load_named_state, named_state, parameter_names
from drivetrain.strategy import Shard, SkipStep, Strategy
from drivetrain_plugins.strategies.averaging import Averaging, has_mean
from drivetrain_plugins.strategies.mean_state import mean_state
from drivetrain_plugins.strategies.new_groups import refuse_new_groups
from drivetrain_plugins.strategies.replicas import on_device
from drivetrain_plugins.strategies.sparse import refuse_sparse


class LocalReplicas(Strategy):
    """Base of the periodic and decentralised strategies; they say what :meth:`mix` does and how often.

    A rank's gradient is scaled by its share of the window times the number of ranks, so that the *mean* of the
    replicas moves by the gradient over all samples of the window, whatever their split; losses with weights of their
    own (tokens) are means over this rank's part.

    Attributes:
        synchronous: whether gradients are averaged before each step, so that nothing is left to mix.
        lays_out: whether something is kept for each parameter, from when training began.
        averaging: the means over all ranks.
    """

    synchronous = False
    lays_out = False
    _groups: list[tuple[Optimizer, int]] = []  # each optimizer with the number of its groups when training began
    _optimizers: list[Optimizer] = []
    _kept: dict[str, torch.Tensor] | None = None  # this rank's weights, while the module holds the consensus
    _fits = False
    _equal = True  # whether all replicas hold the same
    _volume = _dense = 0  # bytes of one average of the gradients, and of all that there would have been
    _stepping = False  # whether an optimizer is stepped through the strategy
    _counted = _uncounted = False  # whether one was since the last batch began, and whether one stepped by itself
    _sums: tuple[torch.Tensor, torch.Tensor]  # over the ranks: those that contributed, and the window's weight

    def mix(self) -> None:
        """Bring the replicas together, every ``period`` steps."""
        raise NotImplementedError

    def begin(self) -> None:
        """All replicas are equal: at the start, and after portable weights were loaded."""

    def settle(self) -> None:
        """Put the weights that are validated and saved into the module: here the mean of the replicas."""
        self.averaging.mean([t for t in self.held().values() if has_mean(t)], counts=False)

    @property
    def period(self) -> int:
        return self.options.period

    @property
    def mixes(self) -> bool:
        """Whether :meth:`mix` brings replicas together, which then depends on every step being counted."""
        return not self.synchronous

    # -- coming to be -------------------------------------------------------------------------------------------
    def check_module(self, module: TrainModule, plan: Plan) -> None:
        exact = self.support.exact_with or {}
        averages_gradients = all(getattr(self.options, name) == value for name, value in exact.items())
        if plan.world_size > 1 and "fit" in plan.stages and averages_gradients:
            options = ", ".join(f"{name}={value}" for name, value in exact.items())
            refuse_sparse(module, f"strategy={plan.strategy} with {options}")

    def connect(self, job: Job) -> None:
        super().connect(job)
        self.data = Shard(self.communicator.rank, self.communicator.world_size)
        self.averaging = Averaging(self.communicator)

    def prepare(self, module: TrainModule, stage: str) -> None:
        super().prepare(module, stage)
        self._kept, self._equal = None, True
        self._fits = stage == "fit"
        if self._fits:  # else what the last fit has is kept: a script may save it after a test
            self._optimizers = []
            for tensor in [*module.parameters(), *module.buffers()]:
                self.communicator.broadcast(tensor.detach())

    def build_optimizers(self, make: Callable[[], list[Optimizer]]) -> list[Optimizer]:
        self._optimizers = make()
        self._volume = self.averaging.volume(list(self.trained().values()))
        self._groups = [(optimizer, len(optimizer.param_groups)) for optimizer in self._optimizers]
        self._counted = self._uncounted = False
        for optimizer in self._optimizers if self.mixes and self.data.size > 1 else []:
            optimizer.register_step_pre_hook(self._note_step)
        self.begin()
        return self._optimizers

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that optimizers hold, by name: all that replicas can differ in but buffers."""
        names = parameter_names(self.module)
        found = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        return {names.get(id(p), f"#{number}"): p for number, p in enumerate(found)}

    def held(self) -> dict[str, torch.Tensor]:
        """What replicas can differ in, detached: trained parameters and buffers."""
        return {name: t.detach() for name, t in [*self.trained().items(), *self.module.named_buffers()]}

    def average_buffers(self) -> None:
        """Each rank saw other batches: running statistics (BatchNorm) become their mean; counts are equal already."""
        self.averaging.mean([b.detach() for b in self.module.buffers() if has_mean(b)], counts=False)

    # -- a step -------------------------------------------------------------------------------------------------
    def forward(self, call: Callable[[Any], Any], batch: Any) -> Any:
        """From here on replicas differ: in running statistics already, where no optimizer step follows."""
        self._equal = self.synchronous or self.data.size == 1
        if self._uncounted and not self._counted:
            raise MisuseError(
                f"the steps of {type(self.module).__name__} are made by optimizers themselves, where no step is counted"
                f" after which strategy={self.name} would bring replicas together: step what self.optimizers() gives."
            )
        self._counted = self._uncounted = False
        return super().forward(call, batch)

    def _note_step(self, *_: Any) -> None:
        self._uncounted |= not self._stepping

    def evaluation_step(self, call: Callable[[Any], Any], batch: Any) -> Any:
        return super().forward(call, batch)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, before_step: Callable[[], None]
    ) -> bool:
        if self.lays_out:
            known = next(count for one, count in self._groups if one is optimizer)
            refuse_new_groups(optimizer, known, self.name)
        self._counted = self._stepping = True
        try:
            stepped = super().optimizer_step(optimizer, closure, before_step)
        finally:
            self._stepping = False
        # A replica that skips counts the step with the others, or they would mix at different steps.
        return stepped or not (self.synchronous or self.data.size == 1)

    def reduce_gradients(self, optimizer: Optimizer, manual: bool) -> None:
        if self.synchronous and self.data.size > 1:
            self.average_gradients(optimizer)

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Average what any rank has a gradient for (a rank without one counts as zero) and the window's weight."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        missing = [p.grad is None for p in parameters]
        device = parameters[0].device if parameters else self.device
        exact = torch.float64 if any(p.dtype.to_real() == torch.float64 for p in parameters) else torch.float32
        marks = on_device([*(float(not m) for m in missing), float(self.contributed), self.weight], exact, device)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self.averaging.mean([*gradients, marks])
        self._sums = marks[-2], marks[-1]
        used = marks.tolist() if any(missing) else []  # only a rank that misses one must ask, and wait for the device
        for number, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            if missing[number] and used[number]:
                p.grad = gradient

    def normalise(self, optimizer: Optimizer) -> None:
        if not self.synchronous or self.data.size == 1:
            super().normalise(optimizer)
            return
        if not self.contributed and float(self._sums[0]) == 0.0:
            raise SkipStep
        weight = self.mean_weight()
        if weight is not None:
            self.scale_gradients(optimizer, 1.0 / weight)

    def mean_weight(self) -> torch.Tensor | None:
        """Over the ranks, of the window whose gradients were averaged, also where this rank's own weight is zero; None
        where losses have no weights of their own. Only a rank that had no loss must ask, and wait for the device."""
        weight = self._sums[1]
        if self.weighted or (not self.contributed and float(weight)):
            return torch.where(weight > 0, weight, 1.0)
        return None

    def after_step(self, step: int) -> None:
        self._dense += self._volume
        if not self.synchronous and step % self.period == 0:
            self.mix()

    # -- evaluation and state -----------------------------------------------------------------------------------
    @contextmanager
    def consensus(self) -> Iterator[None]:
        """The mean of the replicas (a strategy with a centre: that), and this rank's own weights again afterwards."""
        if not self._fits or self.is_settled():
            if self._fits and self.synchronous:
                self.average_buffers()
            yield
            return
        self._kept = {name: t.clone() for name, t in self.held().items()}
        try:
            self.settle()
            yield
        finally:
            for name, tensor in self.held().items():
                tensor.copy_(self._kept[name])
            self._kept = None

    def is_settled(self) -> bool:
        """Whether the module holds the consensus already."""
        return self.synchronous or self._equal

    def finish(self) -> None:
        """The caller's module keeps the consensus."""
        if self._fits and not self.is_settled():
            self.settle()
            self._equal = True

    def state_dict(self, optimizers: list[Optimizer]) -> dict[str, Any]:
        """Portable: the consensus' weights (within :meth:`consensus`) and the mean of the optimizers' states."""
        state = super().state_dict(optimizers)
        if not self.synchronous:
            state["optimizers"] = mean_state(state["optimizers"], self.averaging)
        return state

    def load_state_dict(self, state: dict[str, Any], optimizers: list[Optimizer], strict: bool = True) -> None:
        super().load_state_dict(state, optimizers, strict)
        self._equal = True
        self.begin()

    def own_state(self) -> dict[str, Any]:
        """This replica exactly: its weights, buffers, optimizer states and loss scale, and what :meth:`extra` holds."""
        if self.synchronous:
            return {}
        return {
            "strategy": self.name,
            "held": {name: t.clone() for name, t in (self._kept or self.held()).items()},
            "optimizers": [named_state(self.module, optimizer) for optimizer in self._optimizers],
            "precision": self.precision.state_dict(),
            "equal": self._equal,
            "extra": self.extra(),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        if self.synchronous or "held" not in state:
            return
        if state.get("strategy", self.name) != self.name or _names(state["extra"]) != _names(self.extra()):
            if self.communicator.is_master:
                warnings.warn(
                    "the checkpoint's replicas were brought together in another way than"
                    f" strategy={self.name} does it with these options: all go on from what was validated and saved.",
                    stacklevel=2,
                )
            return
        for name, tensor in self.held().items():
            tensor.copy_(state["held"][name])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            load_named_state(self.module, optimizer, saved)
        self.precision.load_state_dict(state["precision"])
        self._equal = state["equal"]
        for name, tensors in state["extra"].items():
            for key, tensor in self.extra()[name].items():
                tensor.copy_(tensors[key])

    def extra(self) -> dict[str, dict[str, torch.Tensor]]:
        """More tensors that a replica needs to go on exactly, by group and parameter; restored in place."""
        return {}

    def traffic(self) -> dict[str, int]:
        """What was sent to train; ``bytes_dense`` is what averaging the gradients at each step would have sent."""
        return self.averaging.traffic(self._dense)


def _names(extra: dict[str, dict[str, torch.Tensor]]) -> dict[str, set[str]]:
    return {name: set(tensors) for name, tensors in extra.items()}


def like(parameters: dict[str, torch.nn.Parameter], zero: bool = False) -> dict[str, torch.Tensor]:
    """Copies of ``parameters`` (or zeros) that small changes add up in: fp32 where the parameters are of half."""
    with torch.no_grad():
        copies = {
            name: p.detach().to(torch.float32 if p.dtype.itemsize == 2 else p.dtype, copy=True)
            for name, p in parameters.items()
        }
        return {name: torch.zeros_like(t) for name, t in copies.items()} if zero else copies
