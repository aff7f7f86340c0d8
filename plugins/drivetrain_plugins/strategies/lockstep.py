"""The backward passes of ranks that hold a module in shards: all ranks make each of them, with a loss or without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.errors import TrainingError
from drivetrain.launch.job import Job
from drivetrain_plugins.strategies.going_along import GoingAlong, StepWithRest
from drivetrain_plugins.strategies.loss_on_all import LossOnAll
from drivetrain_plugins.strategies.reached import ReachedAlike

if TYPE_CHECKING:
    from drivetrain.module import TrainModule

_WAY_OUT = "use strategy=ddp"


class Lockstep:
    """Sees that the ranks' passes through ``module``, cut by FSDP2, meet.

    Args:
        parts: those of ``module`` that gather their weights by themselves.
        training_step: its step; None where it steps its optimizers itself.
        together: the ranks of ``job`` that compute each batch together with this one.
    """

    def __init__(
        self,
        module: TrainModule,
        parts: Sequence[Any],
        training_step: StepWithRest | None,
        job: Job,
        device: torch.device,
        together: Sequence[int],
    ) -> None:
        self._reached = ReachedAlike(dict(module.named_parameters()), job)
        self._losses = LossOnAll(job)
        self._along = None
        if training_step is not None:
            self._along = GoingAlong(module, parts, training_step, device, self._losses.forward)
        self._together = together

    def close(self) -> None:
        self._reached.close()
        self.let_go()

    def let_go(self) -> None:
        """Of the module, which is given back."""
        if self._along is not None:
            self._along.close()

    def own_state(self) -> dict[str, Any]:
        """What this rank knows of its last step with a loss, as a strategy's own state."""
        known = None if self._along is None else self._along.state_dict()
        return {"passes": known} if known else {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        if self._along is not None and "passes" in state:
            self._along.load_state_dict(state["passes"])

    def without_batch(self) -> None:
        """Instead of ``training_step``, where this rank has no batch: the others gather weights in theirs."""
        if self._along is not None:
            self._along.without_batch()

    def step(self) -> AbstractContextManager[None]:
        """Around the forward and backward pass of a micro-batch."""
        self._losses.step()
        return nullcontext() if self._along is None else self._along.step()

    @contextmanager
    def backward(self, reduces: bool, weighted: bool) -> Iterator[None]:
        """Around a backward pass from a loss, with a weight of its own or not, that ``reduces`` gradients or not."""
        along = self._along
        if along is not None:
            along.turns()
        self._losses.backward()
        with self._reached.watch() if reduces else nullcontext():
            yield
        if along is not None:
            along.went(self._reached.found if reduces else None)
            self._losses.over(weighted, along.told())

    def without_loss(self, reduces: bool, pending: bool) -> tuple[bool, bool] | None:
        """Instead of it where this rank has no loss.

        Args:
            pending: whether this is the last pass of a window, in which the gradients of those before are reduced.

        Returns:
            Whether other ranks had a loss, and whether that came with a weight of its own; None where no rank had one
            and none made a pass.

        Raises:
            TrainingError: other ranks had one and this rank does not know what passes go through, or the window's
                gradients would never be reduced.
        """
        along = self._along
        if along is None or not along.goes():
            self._losses.none(_WAY_OUT, along is None or along.begun())
            if pending:
                raise TrainingError(
                    "training_step returned None for the last batch of an accumulation window, in whose backward pass"
                    " the window's gradients are reduced: return a loss times 0.0 instead, or use"
                    " strategy.reduce_every_micro_batch=true."
                )
            return None
        self._losses.backward()
        with self._reached.watch() if reduces else nullcontext():
            along.go_back()
        return self._losses.went_along(along.told(), self._together, _WAY_OUT)
