"""How the gradients of a window become a step: of the one optimizer, or as a module does it by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from drivetrain.comm import phase
from drivetrain.errors import MisuseError
from drivetrain.loops.plain_backward import PlainBackward
from drivetrain.loops.step import MicroStep, part_of
from drivetrain.optimizer import TrainOptimizer, needs_closure
from drivetrain.strategy import SkipStep
from drivetrain.unprofiled import zero_grad

if TYPE_CHECKING:
    from drivetrain.loops.fit import FitLoop


class Optimization:
    """The optimizers of a run and what a step of theirs goes through.

    Attributes:
        optimizers: as the strategy built them.
        wrapped: as modules see them.
        steps: steps of each optimizer, also those that changed nothing (Lightning's ``global_step``).
        stepped: whether the window at hand has led to a step.
        counts_each: whether ``steps`` is what counts: the step of every optimizer, whether or not it changed anything.
    """

    def __init__(self, fit: FitLoop, steps: int) -> None:
        self.fit = fit
        self.trainer, self.module, self.strategy, self.hooks = fit.trainer, fit.module, fit.strategy, fit.hooks
        self.timing = fit.timing
        self.optimizers: list[Optimizer] = []
        self.wrapped: list[TrainOptimizer] = []
        self.steps = steps
        self.stepped = False
        self.counts_each = fit.trainer.meanings.steps == "optimizer"
        self._micro: MicroStep | None = None
        self._plain = PlainBackward()
        self._through = False  # whether an optimizer of a manual step is stepping through the strategy
        self._complete = False  # whether gradients are global and unscaled, as they are before an optimizer steps
        self._default_step = not self.hooks.module_has("optimizer_step")
        self._default_zero = not self.hooks.module_has("optimizer_zero_grad")
        self._closures = False

    def use(self, optimizers: list[Optimizer]) -> None:
        """Take the optimizers that the strategy built."""
        self.optimizers = optimizers
        self.wrapped = [TrainOptimizer(o, self._step_optimizer, self.module.toggled_optimizer) for o in optimizers]
        self.settle()
        self._closures = any(needs_closure(optimizer) for optimizer in optimizers)

    def settle(self) -> None:
        """See what there is to do around a step: callbacks and the clipping may have changed since the last epoch."""
        plain = self._default_zero and "on_before_zero_grad" not in self.hooks.active
        self._zero = zero_grad if plain else self._zero_as_overridden
        nothing_to_do = (
            "on_before_optimizer_step" not in self.hooks.active
            and not self.trainer.gradient_clip_val
            and self.trainer.nonfinite != "skip"
            and not self.hooks.module_has("configure_gradient_clipping")
        )
        self._before_steps: list[Callable[[], None]] = [
            _nothing if nothing_to_do else partial(self._before_step, optimizer) for optimizer in self.optimizers
        ]

    def automatic(self, steps: list[MicroStep]) -> None:
        """Step the one optimizer; its closure runs the last micro-batch, and the whole window when called again."""
        last = steps[-1]
        strategy = self.strategy
        if not self.optimizers:
            last.loss = strategy.forward_backward(last)
            self.stepped = True
            self.steps += 1
            return
        called = False

        def run(step: MicroStep) -> None:
            if step.runs:
                step.loss = strategy.forward_backward(step)

        def closure() -> Any:
            nonlocal called
            if called:
                for step in steps[:-1]:
                    run(step)
            called = True
            run(last)
            return self._window_loss(steps) if self._closures else last.loss

        if self._default_step:
            optimizer = self.optimizers[0]
            self.stepped = self._through_strategy(optimizer, closure, self._before_steps[0])
            if not called:
                raise MisuseError(
                    f"{type(optimizer).__name__}.step(closure) did not run its closure, which computes the loss and its"
                    " gradients: begin it with 'loss = None if closure is None else closure()'."
                )
        else:
            self.module.optimizer_step(self.fit.epoch, last.index, self.wrapped[0], closure)
            self.steps += self.counts_each  # one a window, and afterwards: warm-ups read the count after their step
            if not called:
                raise MisuseError(
                    f"{type(self.module).__name__}.optimizer_step did not run its closure: call"
                    " optimizer.step(closure=optimizer_closure)."
                )
        if self.timing.on:
            self.fit.clock = self.timing.add_sampled("optimizer", self.fit.clock)

    def _window_loss(self, steps: list[MicroStep]) -> torch.Tensor:
        """The loss that LBFGS reads: over all ranks, or its line searches would part."""
        parts = [step.loss.double() * step.share for step in steps if step.loss is not None]
        mine = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=self.strategy.device)
        return torch.stack(self.strategy.gather(mine.reshape(1))).sum()

    def manual(self, step: MicroStep) -> None:
        """Run a step that makes its own; ``step()`` of the optimizers themselves, not of what ``self.optimizers()``
        gives, finds global gradients, too."""
        size = self.strategy.data.size
        replicas, factor = size > 1, step.share * size
        handles = [o.register_step_pre_hook(self._before_own_step) for o in self.optimizers] if replicas else []
        self._micro = step
        try:
            with self._plain.weighing(factor) if replicas and factor != 1.0 else nullcontext():
                self.strategy.forward(step.call, step.batch)
        finally:
            self._micro = None
            for handle in handles:
                handle.remove()
        if self.timing.on:
            self.fit.clock = self.timing.add_sampled("forward", self.fit.clock)

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward of a loss of the micro-batch at hand in manual optimisation."""
        micro = self._micro
        if self.module.automatic_optimization:
            raise MisuseError(
                "manual_backward is for manual optimisation: set automatic_optimization = False, or return the loss."
            )
        if micro is None:
            raise MisuseError("manual_backward is called outside of training_step: call it within.")
        if args:
            kwargs["gradient"] = args[0]
        self.hooks("on_before_backward", loss)
        self._plain.counted = True
        try:
            with phase.during(phase.BACKWARD):
                self.strategy.backward(loss, micro.share, True, **kwargs)
                self.strategy.after_manual_backward()
        finally:
            self._plain.counted = False
        self.hooks("on_after_backward")

    def _step_optimizer(self, optimizer: Optimizer, closure: Any) -> Any:
        """What a step goes through that the module makes itself; returns what the closure returned first."""
        result: list[Any] = []

        def kept() -> Any:
            result.append(closure())
            return result[-1]

        before = self._before_steps[next(i for i, known in enumerate(self.optimizers) if known is optimizer)]
        self._through = True
        try:
            with phase.during(phase.OPTIMIZER):
                counts = self._through_strategy(optimizer, None if closure is None else kept, before)
        finally:
            self._through = False
        self.stepped = self.stepped or counts
        return result[0] if result else None

    def _before_own_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        """An optimizer is about to step, through the strategy or by itself."""
        if not self._through:
            self.strategy.reduce_gradients(optimizer, True)

    def _through_strategy(self, optimizer: Optimizer, closure: Any, before: Callable[[], None]) -> bool:
        """Step through the strategy; whether it counts."""
        stepped = self.strategy.optimizer_step(optimizer, closure, before)
        if not self.counts_each:
            self.steps += stepped
            return stepped
        automatic = self.module.automatic_optimization
        if not stepped and automatic and not self.strategy.contributed:
            with suppress(SkipStep):  # without any loss there are no gradients, but its hooks are called
                before()
                if self.fit.boundary.alone and not (self._closures or self.strategy.precision.scales):
                    self._step_what_is_there(optimizer)
        self.steps += self._default_step or not automatic
        return True

    def _step_what_is_there(self, optimizer: Optimizer) -> None:
        """Step with gradients that a window without a loss has: zeros, where they are not set to None, by which
        momentum and weight decay go on, or what hooks put there."""
        if any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
            optimizer.step()

    def _before_step(self, optimizer: Optimizer) -> None:
        """Hooks, clipping and the finite check, on the gradients' true and global values."""
        trainer = self.trainer
        self._complete = True
        if "on_before_optimizer_step" in self.hooks.active:
            by_hand = self._micro is not None  # then it counts so already
            with nullcontext() if by_hand else self._plain.weighing(part_of(self.fit, self.fit.metrics.batch)):
                self.hooks("on_before_optimizer_step", optimizer)
        if trainer.nonfinite == "skip" and not self.strategy.precision.scales:
            # An infinite bound clips nothing: this is the strategy's own way to the global norm.
            norm = self.strategy.clip_gradients(optimizer, float("inf"), "norm")
            if norm is not None and not bool(torch.isfinite(norm)):
                warnings.warn(f"step {self.fit.global_step + 1} is skipped: its gradient is not finite.", stacklevel=2)
                raise SkipStep
        if self.module.automatic_optimization or trainer.gradient_clip_val:
            self.module.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )
        self._complete = False

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        """Clip true and global gradients. A module that optimises by hand may clip before it steps, when gradients are
        still this rank's own: they are completed first. The step completes them again, which changes nothing then."""
        if not self._complete and not self.module.automatic_optimization:
            self.strategy.reduce_gradients(optimizer, True)
            self.strategy.precision.unscale(optimizer)
        self.strategy.clip_gradients(optimizer, value, algorithm)

    def zero_grad(self) -> None:
        """Zero the gradients that the one optimizer reads, where there is one."""
        if self.optimizers:
            self._zero(self.optimizers[0])

    def _zero_as_overridden(self, optimizer: Optimizer) -> None:
        """Zero with the hooks around it, or as the module does it."""
        self.hooks("on_before_zero_grad", optimizer)
        if self._default_zero:
            zero_grad(optimizer)
        else:
            self.module.optimizer_zero_grad(self.fit.epoch, self.fit.batch, optimizer)

    def shorten(self, steps: list[MicroStep], expected: int) -> None:
        """Let ``steps``, of which the last is to come, weigh as the whole window, which was to have ``expected``."""
        if any(step.weighted for step in steps):  # then the sum of their weights is divided out
            return
        factor = expected / len(steps)
        for step in steps:
            step.share *= factor
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            for parameter in group["params"]:
                if len(steps) > 1 and parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def drop(self, steps: list[MicroStep]) -> None:
        """Forget the gradients of a window that is not finished."""
        if len(steps) > 1:
            for optimizer in self.optimizers:
                optimizer.zero_grad()


def _nothing() -> None:
    """Before an optimizer step for which nobody wants to do anything."""
