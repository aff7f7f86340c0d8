"""One micro-batch of training: what it weighs, the call of ``training_step``, and what that returned."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.comm import phase
from drivetrain.errors import MisuseError, TrainingError, note_place
from drivetrain.loops.boundary import nonfinite
from drivetrain.loops.plain_backward import PlainBackward

if TYPE_CHECKING:
    from drivetrain.loops.fit import FitLoop
    from drivetrain.loops.windows import Window
    from drivetrain.sharding import MicroBatch


class LossOnly(dict[str, Any]):
    """What ``on_train_batch_end`` is given of a step whose pieces ran on other ranks: its loss."""

    def __missing__(self, key: str) -> Any:
        raise MisuseError(
            f"outputs[{key!r}] is asked for in on_train_batch_end, and training_step was called with pieces of the"
            " batch and on other ranks, so that the loss of all of it is known only: log the value in training_step, or"
            " use strategy=ddp."
        )


class MicroStep:
    """Fulfils :class:`drivetrain.strategy.Step`.

    Attributes:
        micro: the batch as it was read.
        batch: the batch on the device.
        first: whether it opens its window, so that gradients are zeroed.
        output: what ``training_step`` returned, for ``on_train_batch_end``.
        loss: the detached loss, None where the batch was skipped.
        value: the loss as a number, where it was read to be checked.
        weighted: whether the module gave the loss's weight itself; ``share`` is then that weight.
        absent: whether the loader gave None, which stands for a batch that there is not.
        whole: the detached loss of the whole batch, which a strategy sets that calls the step for pieces of it, or on
            other ranks.
        runs: whether the strategy is given it. Of several replicas others may have a batch, so that an absent one goes
            through as one whose step gave no loss.
    """

    __slots__ = (
        *("_fit", "absent", "batch", "first", "index", "last", "loss", "micro", "output", "runs", "share", "value"),
        *("weighted", "whole"),
    )

    def __init__(self, fit: FitLoop, micro: MicroBatch, batch: Any, share: float, first: bool, last: bool) -> None:
        self._fit = fit
        self.micro = micro
        self.batch = batch
        self.index = micro.index
        self.share = share
        self.first = first
        self.last = last
        self.output: Any = None
        self.whole: Tensor | None = None
        self.loss: Tensor | None = None
        self.value: float | None = None
        self.weighted = False
        self.absent = batch is None
        self.runs = not self.absent or fit.strategy.data.size > 1

    def call(self, batch: Any, fraction: float = 1.0) -> Tensor | None:
        fit = self._fit
        metrics, hooks, module = fit.metrics, fit.hooks, fit.module
        if self.absent:
            if self.runs and not module.automatic_optimization:
                raise TrainingError(
                    f"the train loader gave rank {fit.trainer.global_rank} None for batch {self.index} of epoch"
                    f" {fit.epoch}, and {type(module).__name__} optimises by hand: whether other ranks make steps there"
                    " that it would miss is not known. Leave such samples out in the data set, or use one device."
                )
            fit.strategy.without_batch()
            return None
        metrics.batch, metrics.fraction = self.micro, fraction
        former, hooks.current = hooks.current, "training_step"
        try:
            output = module.training_step(batch, self.index) if fit.step_takes_index else module.training_step(batch)
        except Exception as error:
            epoch, step = fit.epoch, fit.global_step + 1
            note_place(
                error, f"in {type(module).__name__}.training_step, batch {self.index} of epoch {epoch}, step {step}"
            )
            raise
        finally:  # a strategy may abandon the step on the way
            hooks.current = former
            metrics.fraction = 1.0
        self.output = output
        loss = output if isinstance(output, Tensor) else self._from_mapping(output)
        if not module.automatic_optimization:
            self.loss = loss.detach() if loss is not None and loss.numel() == 1 else None
            return loss
        if loss is None:
            return None
        if loss.ndim:
            if loss.numel() != 1:
                raise TrainingError(
                    f"training_step returned a loss of shape {tuple(loss.shape)} at step {fit.global_step + 1}: return"
                    " a scalar, such as loss.mean()."
                )
            loss = loss.reshape(())
        if not loss.requires_grad:
            raise TrainingError(
                f"training_step returned a loss without a graph at step {fit.global_step + 1}: it does not depend on"
                " any parameter that requires a gradient, or it was detached."
            )
        if fit.check_each_loss:
            value = loss.item()
            if not isfinite(value):
                raise nonfinite(value, fit.global_step + 1, fit.trainer.global_rank)
            self.value = value if fraction == 1.0 else None
        return loss

    def _from_mapping(self, output: Any) -> Tensor | None:
        if output is None:
            return None
        if not isinstance(output, Mapping):
            raise MisuseError(
                f"training_step returned a {type(output).__name__}: return the loss, a mapping with 'loss', or None"
                " to skip the batch."
            )
        if "loss" not in output:
            if not self._fit.module.automatic_optimization:
                return None
            raise MisuseError(
                f"training_step returned a mapping without 'loss' (it has {', '.join(map(str, output)) or 'nothing'})."
            )
        loss = output["loss"]
        weight = output.get("weight")
        if weight is not None and loss is not None:
            self.weighted = True
            self.share = float(weight) / self.micro.copies
            if self.share < 0:
                raise TrainingError(f"training_step returned a negative weight ({float(weight)}).")
        return loss

    @property
    def outputs(self) -> dict[str, Any] | None:
        """What ``on_train_batch_end`` is given: what the step returned, as a mapping without graphs; None where there
        was no step."""
        if self.absent:
            return None
        if self.whole is not None:
            return LossOnly(loss=self._normalised(self.whole))
        output, fit = self.output, self._fit
        if isinstance(output, Tensor):
            found = {"loss": output.detach()}
        elif isinstance(output, Mapping):
            found = {key: item.detach() if isinstance(item, Tensor) else item for key, item in output.items()}
        else:
            return {}
        if fit.module.automatic_optimization and isinstance(found.get("loss"), Tensor):
            found["loss"] = self._normalised(found["loss"])
        return found

    def zero_grad(self) -> None:
        if self.first:
            self._fit.optimization.zero_grad()

    def before_backward(self, loss: Tensor) -> None:
        fit = self._fit
        if "on_before_backward" in fit.hooks.active:
            fit.hooks("on_before_backward", self._normalised(loss))
        if fit.timing.on:
            fit.clock = fit.timing.add_sampled("forward", fit.clock)
        phase.current.name = phase.BACKWARD

    def after_backward(self) -> None:
        fit = self._fit
        phase.current.name = phase.OPTIMIZER
        if "on_after_backward" in fit.hooks.active:
            with PlainBackward().weighing(part_of(fit, self.micro)):
                fit.hooks("on_after_backward")
        if fit.timing.on:
            fit.clock = fit.timing.add_sampled("backward", fit.clock)

    def _normalised(self, loss: Tensor) -> Tensor:
        """The loss as hooks see it: under Lightning's meaning of a window, divided by its length."""
        fit = self._fit
        divided = fit.same_weight and fit.trainer.accumulate_grad_batches > 1
        return loss * (self.share * fit.strategy.data.size) if divided else loss


def share_of(fit: FitLoop, micro: MicroBatch, window: Window) -> float:
    """What a micro-batch weighs in its window; the shares of all ranks sum to one."""
    if not fit.same_weight:
        assert window.total is not None
        return micro.count / micro.copies / window.total
    ranks = fit.strategy.data.size if fit.data.source.own_stream else 1
    return micro.weight / micro.total / len(window.batches) / ranks


def part_of(fit: FitLoop, micro: MicroBatch) -> float:
    """What a loss counts by which a hook goes back by itself: more than 1 on a rank with more samples of the batch than
    others. Where ranks have batches of their own it is not known."""
    ranks = fit.strategy.data.size
    return 1.0 if ranks == 1 or fit.data.source.own_stream or not micro.total else micro.weight / micro.total * ranks


def mean_loss(steps: list[MicroStep]) -> tuple[Any, float]:
    """The loss of a window on this rank and its weight: a number where it is known, else a tensor on the device."""
    if len(steps) == 1:
        step = steps[0]
        if step.loss is None:
            return 0.0, 0.0
        return (step.loss if step.value is None else step.value), step.share
    parts = [(step.loss, step.share) for step in steps if step.loss is not None]
    weight = sum(share for _, share in parts)
    if weight == 0:
        return 0.0, 0.0
    return torch.stack([loss.double() * share for loss, share in parts]).sum() / weight, weight
