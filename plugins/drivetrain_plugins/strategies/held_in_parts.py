"""What strategies share whose ranks hold parts of parameters, as DTensors: clipping, evaluation and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.comm.communicator import Communicator
from drivetrain.errors import TrainingError
from drivetrain.in_parts import InParts
from drivetrain.named_optimizer import parameter_names
from drivetrain.strategy import Strategy
from drivetrain_plugins.strategies import dtensors
from drivetrain_plugins.strategies.dtensors import parameters_of
from drivetrain_plugins.strategies.first_step import FirstStep
from drivetrain_plugins.strategies.lockstep import Lockstep
from drivetrain_plugins.strategies.plain import Original, cut_parameters
from drivetrain_plugins.strategies.replicas import average_buffers

if TYPE_CHECKING:
    from drivetrain.module import TrainModule


class HeldInParts(Strategy):
    """The module is changed in place, and is the caller's again when the fit is over."""

    replicas: Communicator  # the ranks that compute with other samples and the same part of a layer
    original: Original | None = None  # of the module that is held in parts
    _passes: Lockstep | None = None  # where gradients are reduced in shards
    _cut: Sequence[FSDPModule] = ()  # what gathers its weights for a pass
    _first: FirstStep
    _fits = False  # whether the ranks' running statistics part
    _begun = False  # whether a step of this fit was made
    _reductions = 0

    def prepare(self, module: TrainModule, stage: str) -> None:
        super().prepare(module, stage)
        self._fits, self._begun = stage == "fit", False
        names = parameter_names
        self._first = FirstStep(self.communicator, f"strategy={self.name}", lambda _: names(module), of_all=True)

    def agree_on_weights(self) -> None:
        """Every rank begins with the first one's weights."""
        for one in [*self.module.parameters(), *self.module.buffers()]:
            self.communicator.broadcast(one.detach())

    # -- a step -------------------------------------------------------------------------------------------------
    def sum_weights(self) -> None:
        """What the other ranks' losses weigh is not known here: all ranks ask, also one whose own weigh nothing."""
        weight = torch.tensor(self.weight, dtype=torch.float64, device=self.replicas.device)
        self.weight = float(self.replicas.all_reduce(weight)) / self.data.size

    def scale_gradients(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        dtensors.scale(parameters_of(optimizer), factor)

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> Tensor | None:
        return dtensors.clip(parameters_of(optimizer), value, algorithm)

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        let_go(self._cut)
        if not self.module.automatic_optimization:  # it may have gone backward by itself
            refuse_late_gradients(self.module, self._cut, f"strategy={self.name}")

        def step() -> bool:
            with dtensors.stepping(optimizer), self._grouped(optimizer):
                return super(HeldInParts, self)._step(optimizer, closure)

        return self._first.step(optimizer, step)

    def _grouped(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Around a step, for groups that are to be other ones in it."""
        return nullcontext()

    # -- evaluation and state -----------------------------------------------------------------------------------
    def evaluation_step(self, call: Callable[[Any], Any], batch: Any) -> Any:
        # What is gathered under inference mode could not be used in training any more, and DTensor has no rules there.
        with torch.inference_mode(False), torch.no_grad(), dtensors.computing():
            output = super().evaluation_step(call, batch)
        let_go(self._cut)  # no backward pass follows, and a hook may write to the weights
        return output

    @contextmanager
    def consensus(self) -> Iterator[None]:
        if self._fits:
            average_buffers(self.replicas, self.module.buffers())
        yield

    def state_dict(self, optimizers: list[Optimizer]) -> dict[str, Any]:
        return dtensors.state(super().state_dict([]), self.module, optimizers, self.original)

    def load_state_dict(self, state: dict[str, Any], optimizers: list[Optimizer], strict: bool = True) -> None:
        dtensors.load_state(self.module, self.precision, state, optimizers, strict)

    def load_optimizer(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        dtensors.load_optimizer(self.module, optimizer, saved)

    def without_batch(self) -> None:
        if self._passes is not None:
            self._passes.without_batch()

    def own_state(self) -> dict[str, Any]:
        """What a step with a loss goes through, by which this rank goes along without one."""
        return {} if self._passes is None else self._passes.own_state()

    def load_own_state(self, state: dict[str, Any]) -> None:
        if self._passes is not None:
            self._passes.load_own_state(state)

    def load_first_state(self, state: dict[str, Any]) -> None:
        self.load_own_state(state)  # all ranks go through the same

    def finish(self) -> None:
        """The caller's module has its whole weights again."""
        if self.original is not None and self.module.trainer.return_weights:
            if self._passes is not None:
                self._passes.let_go()
            with self.consensus():
                self.original.give_back()
            self._fits = False  # the statistics are settled, and may be where the ranks' group cannot read them

    def close(self, error: BaseException | None = None) -> None:
        if self._passes is not None:
            self._passes.close()
        dtensors.accept_new_data()
        if self.hangs_up(error):
            self._leave()
        super().close(error)

    def _leave(self) -> None:
        """A stage failed in a script, which may go on with the module."""
        original = self.original
        held = [*self.module.modules(), *self.module.parameters()]
        if original is None or not any(isinstance(one, (FSDPModule, DTensor)) for one in held):
            return

        def together(ranks: Communicator) -> None:
            original.give_back(lambda part: dtensors.put_together(part, ranks))

        InParts(self.module, original.kind, self, together, lambda: original.give_back(dtensors.without_values))


def reduced(module: nn.Module, ranks: int, times: int) -> dict[str, int]:
    """What a rank sends when the gradients of a sharded ``module`` are reduce-scattered so many ``times``: to each of
    the others the part of the gradients that is theirs, block by block."""
    parts = [dtensors.local(p) for p in module.parameters() if p.requires_grad]
    sent = times * (ranks - 1) * sum(part.nbytes for part in parts)
    blocks = sum(isinstance(one, FSDPModule) for one in module.modules())
    return {"bytes_sent": sent, "bytes_dense": sent, "messages": times * (ranks - 1) * blocks}


def let_go(parts: Iterable[FSDPModule]) -> None:
    """Before weights change: what is still gathered, of a forward pass that no backward pass followed, would be taken
    for the new weights in the next."""
    for part in parts:
        part.reshard()


def gone_back(module: TrainModule, parts: Sequence[FSDPModule], reduced: bool, way: str) -> None:
    """A backward pass from a loss is over, in which gradients were ``reduced`` or not."""
    if isinstance(module, FSDPModule):
        module.reshard()
    if reduced:
        refuse_late_gradients(module, parts, way)


def refuse_late_gradients(module: TrainModule, parts: Iterable[FSDPModule], way: str) -> None:
    """Refuse a gradient that an optimizer would step without, and have in its next step, also where the module zeroed
    gradients in between: it came to whole weights when the ranks had brought theirs together, as where a loss has a
    gradient of a gradient in it. Call it when a backward pass that reduces gradients is over."""
    late = []
    for part in parts:
        for one in cut_parameters(part):
            whole = getattr(one, "_unsharded_param", None)  # made when it is gathered for the first time
            if whole is not None and whole.grad is not None:
                late.append(id(one.sharded_param))
    if late:
        stepped = {id(p) for optimizer in module.trainer.optimizers for p in parameters_of(optimizer)}
        names = parameter_names(module)
        for name in [names.get(one, "a parameter") for one in late if one in stepped]:
            raise TrainingError(
                f"a gradient of {name} came when {way} had brought together those of its block: a loss"
                " with a gradient of a gradient in it (create_graph=True) needs strategy=ddp."
            )
