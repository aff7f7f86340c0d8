"""The training loop. ``run`` is a run, ``_epoch`` an epoch, ``_window`` an optimizer step: read in this order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from drivetrain import metric_states, stage_data
from drivetrain.comm import phase
from drivetrain.errors import PossibleUserWarning, TrainingError
from drivetrain.loops.boundary import Boundary
from drivetrain.loops.early_end import EarlyEnd
from drivetrain.loops.limits import Limits
from drivetrain.loops.names import RunningLoop
from drivetrain.loops.optimize import Optimization
from drivetrain.loops.schedules import Schedules
from drivetrain.loops.step import MicroStep, mean_loss, share_of
from drivetrain.loops.step_arguments import takes
from drivetrain.loops.training_data import TrainingData
from drivetrain.loops.validation import Validations
from drivetrain.loops.windows import Window, Windows
from drivetrain.sharding import BatchSource
from drivetrain.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain.metric_exchange import Column
    from drivetrain.trainer import Trainer


class EndEpoch(Exception):
    """``on_train_batch_start`` returned -1: no more batches in this epoch."""


class FitLoop(RunningLoop):
    """Trains. Its public attributes are where training stands; a checkpoint holds them.

    Attributes:
        epoch: number of the epoch being trained, from 0.
        batch: micro-batches of this epoch that are done.
        global_step: optimizer steps done (a step of several optimizers on one batch counts once).
        optimization, schedules: the optimizers and what a step goes through; the schedulers and when they step.
        limits, validations: when training is over; when it is validated.
        data: what is read.
        ended: whether the epoch's end has come so far that only checkpoints and monitors are left of it.
        between_steps: false among the micro-batches of a window, where gradients are incomplete.
        batches_seen: micro-batches of all epochs.
        same_weight: whether the micro-batches of a window weigh the same, whatever their samples.
        forward_only: set by a callback at an epoch's start: its batches only run forward (statistics of BatchNorm).
        newest_loss: the loss of the last micro-batch on this rank, detached, and what it weighs among the ranks' losses
            of that batch; None where there was none, or another rank has it.
    """

    def __init__(
        self,
        trainer: Trainer,
        source: BatchSource | None = None,
        current_epoch: int = 0,
        global_step: int = 0,
        batches_seen: int = 0,
        optimizer_steps: int = 0,
        is_last_batch: int = False,
    ) -> None:
        self.trainer = trainer
        self.data = TrainingData(trainer, source, current_epoch)
        self.module = trainer.lightning_module
        self.strategy = trainer.strategy
        self.hooks = trainer.hooks
        self.metrics = trainer.metrics
        self.timing = trainer.timing
        self.boundary = Boundary(trainer, global_step)
        self.epoch = current_epoch
        self.batch, self.batch_idx = 0, -1
        self.in_batch = self.in_epoch = False
        self.global_step = global_step
        self.same_weight = trainer.meanings.window == "batches"
        self.ended = False
        self.between_steps = True
        self.forward_only = False
        self.newest_loss: tuple[torch.Tensor, float] | None = None
        self.batches_seen = batches_seen
        self._at_each_batch = trainer.meanings.moments == "batch"
        self.resumed = self.restored = False
        self.cut = False  # training stopped among the batches of an epoch
        self._broken = False
        self.opened = False  # whether the data are open already, for a trial within another fit
        self.seconds_before = 0.0
        self.clock = perf_counter()
        self.is_last_batch = bool(is_last_batch)  # of an earlier fit, until this one reads a batch
        self.last_batch_size = 0
        self.step_takes_index = takes(self.module.training_step, "batch_idx", 1)
        # On the host's own memory the check is free; elsewhere it would wait for the device, so boundaries do it.
        self.check_each_loss = trainer.nonfinite == "raise" and self.strategy.device.type == "cpu"
        self._counts_steps = type(self.strategy).after_step is not Strategy.after_step
        self._inner = False
        self._inner_losses: list[tuple[Any, float]] = []  # of the round: loss and weight of each inner step
        self.optimization = Optimization(self, optimizer_steps)
        self.schedules = Schedules(self)
        self.limits, self.validations = Limits(self), Validations(self)
        self._early_end: EarlyEnd | None = None
        self._trainable = self._which_train()

    def use(self, optimizers: list[Optimizer]) -> None:
        """Take the optimizers that the strategy built."""
        self.optimization.use(optimizers)

    @property
    def optimizers(self) -> list[Optimizer]:
        return self.optimization.optimizers

    @property
    def counted_steps(self) -> int:
        """``trainer.global_step``, which ``max_steps`` and checkpoints' names count."""
        return self.optimization.steps if self.optimization.counts_each else self.global_step

    def counters(self) -> dict[str, int]:
        """What a later ``fit`` counts on from."""
        return {
            "current_epoch": self.epoch + self.cut,
            "global_step": self.global_step,
            "batches_seen": self.batches_seen,
            "optimizer_steps": self.optimization.steps,
            "is_last_batch": self.is_last_batch,
        }

    # -- a run --------------------------------------------------------------------------------------------------
    def run(self, started: Callable[[], None] | None = None) -> None:
        """``started`` is called when the hooks of the start of training have been."""
        trainer, hooks = self.trainer, self.hooks
        source = None if trainer.limits["train"] == 0 else self.data.source  # no loader is asked for that nobody reads
        # A checkpoint made when an epoch's batches were done has its end ahead, also where nothing comes after that.
        if self.limits.over() and not (self.limits.unfinished() and self.is_last_batch):
            if not self.restored and source is not None and not source.opened:
                source.open(keep=False)  # which may draw random numbers, as where there is something to train
            return
        self.schedules.start()
        if trainer.meanings.modes == "train":
            self.module.train()
        else:
            self._tell_of_modes()
        opened = self.opened or self.data.source.opened  # a schedule may have asked for the length
        if not self.resumed and not opened and trainer.random_state is None:
            # A later call of fit opens anew, in Lightning's natural order. What goes on from saved random states opens
            # when they are back, as the run did that they are of.
            self.data.source.open(keep=self.epoch == 0 or self.restored)
        if self.validations.in_epoch():
            stage_data.validation(trainer)
        hooks.follow()
        # What was logged in an epoch that goes on is not looked at as if it were at its end.
        trainer.published.by_step = self.resumed and not self.ended
        hooks("on_train_start")
        if started is not None:
            started()
        self.timing.started = perf_counter()
        self.boundary.start(self.global_step, self.seconds_before)
        if hooks.module_has("on_train_batch_start") and dist.is_initialized() and not self.boundary.alone:
            self._early_end = EarlyEnd(trainer)
        try:
            while self.limits.unfinished() or not self.limits.over():
                self._epoch()
        finally:
            if self._early_end is not None:
                self._early_end.close()
        self.timing.total += perf_counter() - self.timing.started
        trainer.training = True
        hooks("on_train_end")

    def _tell_of_modes(self) -> None:
        resting = sum(not part.training for part in self.module.modules())
        if resting and self.trainer.is_global_zero:
            warnings.warn(
                f"{resting} parts of {type(self.module).__name__} are in evaluation mode and are trained in it:"
                " call train() where dropout and running statistics are meant to work.",
                PossibleUserWarning,
                stacklevel=2,
            )

    @property
    def finished(self) -> bool:
        """Whether an earlier call of ``fit`` has come to the limits already."""
        return self.global_step > 0 and self.limits.over()

    # -- an epoch -----------------------------------------------------------------------------------------------
    def _epoch(self) -> None:
        complete, self.in_epoch = True, True
        if self.ended:  # resumed from a checkpoint made in the end hooks: the epoch's metrics are out
            self.metrics.reset()
            self.resumed = False
            self.trainer.restore_random_state()
        else:
            complete = self._batches()
            self.metrics.batch = None
            self._end_epoch(complete)
        if not complete:
            self.cut, self.in_epoch = True, False
            return
        if self.is_last_batch:
            self.schedules.after_epoch(plateau=True)
        self.epoch += 1
        self.batch = self.validations.validated_at = 0
        self.ended = self.validations.done = self.in_epoch = False

    def _which_train(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.module.parameters()]

    def _follow_trainable(self) -> None:
        """Tell the strategy where parameters were frozen or thawed since it looked at them."""
        now = self._which_train()
        if now != self._trainable:
            self._trainable = now
            self.strategy.trainable_changed()

    def _batches(self) -> bool:
        """The epoch's batches; False when training was stopped among them."""
        trainer, hooks = self.trainer, self.hooks
        resumed, self.resumed = self.resumed, False
        if not resumed:  # a checkpoint from between two epochs: what follows drew from these states
            self.trainer.restore_random_state()
        self.data.begin(self.epoch)
        self.forward_only = False
        if not resumed:
            self.schedules.stepped_in_epoch = 0
        hooks.follow()
        hooks("on_train_epoch_start")
        if not resumed:
            self.val_loop.batch_progress.total.reset()
        hooks.follow()
        self.data.take_up(self.epoch)
        self.optimization.settle()
        self._follow_trainable()
        window = 1 if self.forward_only else trainer.accumulate_grad_batches
        windows = Windows(self, self.data.source, self.batch, window)
        trainer.restore_random_state()
        self._broken = False
        if resumed and self.batch:  # the checkpoint may be of a moment before any of this
            window = (self.batch - 1) % trainer.accumulate_grad_batches + 1
            self.validations.newest = 1 if self._at_each_batch else window
            self.boundary.keep_log_step()
            self._after_batches(self.batch - 1)
        try:
            self.strategy.run_epoch(self, windows)
        except EndEpoch:
            self.is_last_batch = True
            self.schedules.after_epoch(plateau=False)
        else:
            if self.batch == 0 and not self._broken:
                raise TrainingError(
                    f"the train data is empty: its loader gave no batch in epoch {self.epoch}; an iterator that can be"
                    " read only once serves one epoch."
                )
        return not self._broken or self.is_last_batch

    def _end_epoch(self, complete: bool) -> None:
        """Hooks of the epoch's end around the reduction of its metrics."""
        trainer, hooks, metrics, boundary = self.trainer, self.hooks, self.metrics, self.boundary
        phase.current.name = phase.BOUNDARY
        trainer.published.keep()
        trainer.published.by_step = False
        first: dict[str, float] = {}
        if trainer.meanings.live_metrics and not boundary.alone and hooks.overridden_everywhere("on_train_epoch_end"):
            so_far = boundary.agree(metrics, self._latest_columns() | metrics.epoch_columns())
            objects = metrics.torchmetrics(so_far.columns, reset=False)
            trainer.published.publish(so_far.joined(objects), step=0, write=False)
            metrics.made_known()
            first = objects.values
        hooks.of_callbacks("on_train_epoch_end", monitors=False)
        hooks.of_module("on_train_epoch_end")
        shown = trainer.meanings.live_metrics and boundary.alone  # then a validation may have logged the names anew
        latest = {} if shown else self._latest_columns()
        exchange = boundary.agree(metrics, latest | metrics.epoch_columns())
        kept = {name: value for name, value in first.items() if name in exchange.lost}
        known = exchange.joined(metrics.torchmetrics(exchange.columns, kept=kept))
        trainer.published.publish(known, step=self.global_step - 1)
        self.ended = complete  # what came before must not happen twice, and a checkpoint made earlier has it ahead
        if complete:
            metrics.reset()
        hooks.of_callbacks("on_train_epoch_end", monitors=True)
        boundary.agree_to_stop(metrics)
        self.obey(boundary.signal)

    def _latest_columns(self) -> dict[str, Column]:
        validated = self.validations.newest_names
        return self.metrics.latest_columns(validated, self.validations.validated_at)

    def __call__(self, source: Iterable[Window], *, inner: bool = False) -> None:
        """The batch loop (:class:`drivetrain.strategy.Run`)."""
        if inner:
            self._inner, self.metrics.joined, self.between_steps = True, self.batch, False
            with suppress(EndEpoch):  # it ends this client's training, not the round that others are in
                for window in source:
                    self._window(window)
            self._inner = False
            return
        if self.limits.over_in_epoch():  # a checkpoint of the moment in which training was stopped
            self._broken = True
            self.is_last_batch &= self.batch > 0
            return
        for window in source:
            self._window(window)
            if self.limits.over_in_epoch():
                self._broken = True
                break

    def outer(self, samples: int, last: bool = True) -> None:
        """Count a round as one global step; what was logged in it, and its loss, are means over all its batches."""
        self.is_last_batch, self.between_steps, self.validations.done = last, True, False
        self.validations.newest = 1
        self.optimization.steps += 1
        self.batch += 1
        self.batches_seen += 1
        self.last_batch_size = samples
        self.timing.samples += samples
        self._count()
        weight = sum(weight for _, weight in self._inner_losses)
        total = sum(loss * weight for loss, weight in self._inner_losses)
        self._inner_losses.clear()
        self.boundary.record(self.global_step, total / weight if weight else 0.0, weight)
        if last:
            self.schedules.after_epoch(plateau=False)
        # The others had theirs for each inner batch, between which nothing can be saved.
        self.hooks.of_callbacks("on_train_batch_end", None, None, self.batch - 1, saving=True)
        self._after_batches(self.batch - 1)
        self.metrics.joined = None

    # -- a window: the micro-batches of one optimizer step ------------------------------------------------------
    def _window(self, window: Window) -> None:
        trainer, hooks, timing, optimization = self.trainer, self.hooks, self.timing, self.optimization
        batches, total, inner = window.batches, window.total, self._inner
        final = len(batches) - 1
        optimization.stepped, steps_before = False, optimization.steps
        self.last_batch_size = int(total or 0)
        timing.on = self.global_step % timing.stride == 0
        steps: list[MicroStep] = []
        for number, micro in enumerate(batches):
            closes = number == final or (total is None and micro.last)
            self.is_last_batch, self.batch_idx, self.in_batch = micro.last, micro.index, True
            if total is None:
                self.last_batch_size += micro.total
            batch = trainer.to_device(micro)
            first = number == 0 or not any(one.runs for one in steps)
            step = MicroStep(self, micro, batch, share_of(self, micro, window), first, closes)
            steps.append(step)
            if closes and number < final:
                optimization.shorten(steps, len(batches))
            self.metrics.batch = micro
            # What this rank's metrics gather of samples that the first rank has, too, counts there.
            kept = metric_states.states(self.module) if micro.copies > 1 and self.strategy.data.rank > 0 else None
            trainer.published.by_step = True
            if step.absent:
                warnings.warn("the train loader gave None for a batch: such batches are passed over.", stacklevel=2)
            if "on_train_batch_start" in hooks.active:
                self._begin_batch(steps)
            if timing.on:
                self.clock = perf_counter()
            phase.current.name = phase.FORWARD
            hooks.current = "optimizer_step"
            if not step.runs and (first or not closes):
                pass  # nothing to step with, or not yet
            elif not self.module.automatic_optimization or self.forward_only:
                optimization.manual(step)
                optimization.steps += self.forward_only and micro.last  # Lightning counts one that changes nothing
            elif closes:
                optimization.automatic(steps)
            else:
                step.loss = self.strategy.forward_backward(step)
            hooks.current = None
            self.newest_loss = None if step.loss is None else (step.loss, step.share)
            if inner:  # a round is one, however many its clients make, which ranks have different numbers of
                optimization.steps = steps_before
            self.between_steps = closes and not inner
            if not inner:
                # Lightning writes metrics and steps schedules by windows, whatever a module made of them.
                counts = optimization.stepped or optimization.counts_each
                if closes and counts and (micro.last or not self.forward_only):
                    self._count()
                    loss, weight = mean_loss(steps)
                    self.boundary.record(self.global_step, loss, weight)
                if micro.last:  # before validation, whose checkpoints then hold the next epoch's rate
                    self.schedules.after_epoch(plateau=False)
                self.batch = micro.index + 1
                self.batches_seen += 1
                self.validations.done = False
            self.in_batch = False
            if kept is not None:
                metric_states.load(self.module, kept)
            if "on_train_batch_end" in hooks.active:
                arguments = (step.outputs, batch, step.index)
                if inner:
                    hooks.of_callbacks("on_train_batch_end", *arguments, saving=False)
                    hooks.of_module("on_train_batch_end", *arguments)
                else:
                    hooks("on_train_batch_end", *arguments)
            if self._at_each_batch and not self.between_steps and not inner and self._within_window():
                self.between_steps = True
                optimization.drop(steps)
                return
        if inner:
            if optimization.stepped:
                loss, weight = mean_loss(steps)
                self._inner_losses.append((loss, weight if steps[-1].weighted else weight * (total or 0.0)))
        elif self.between_steps:
            timing.samples += self.last_batch_size
            self.validations.newest = 1 if self._at_each_batch else len(batches)
            self._after_batches(steps[-1].index)
        else:  # a stream shorter than it said: Lightning makes no step of it
            self.between_steps = True
            for optimizer in self.optimizers:
                optimizer.zero_grad()

    def _begin_batch(self, steps: list[MicroStep]) -> None:
        """Call ``on_train_batch_start``, which may end the epoch before this batch."""
        step = steps[-1]
        if not step.absent and self.hooks("on_train_batch_start", step.batch, step.index) == -1:
            self.between_steps = True
            self.metrics.leave_out(step.index)
            self.batches_seen += self._at_each_batch  # it was read, which Lightning counts
            self.optimization.drop(steps)
            if self._early_end is not None and not self._inner:  # a client's end is its own
                self._early_end.agree(self.epoch, step.index)
            raise EndEpoch
        if self._early_end is not None and not self._inner:
            self._early_end.went_on(self.epoch, step.index)

    def _count(self) -> None:
        self.global_step += 1
        if self._counts_steps:
            self.strategy.after_step(self.global_step)
        if self.trainer.lr_scheduler_configs:
            self.schedules.after_step()

    def _within_window(self) -> bool:
        """Validate where that is due among the batches of a window; whether training stops there, its step unmade."""
        self.validations.run_if_due(last=False)
        return self.limits.stop()

    def _after_batches(self, index: int) -> None:
        """What is due after batch ``index``, the last of a window, and was not done yet: log boundary, validation."""
        boundary = self.boundary
        schedules = self.schedules
        if self.global_step >= boundary.next_step or boundary.wish_pending() or schedules.plateau_due:
            self._agree(index)
        if self.trainer.validation is not None:
            self.validations.run_if_due(self.is_last_batch)
        if schedules.plateau_due:
            with self.trainer.published.of_step():  # also where a validation came between
                schedules.after_metrics()
        if boundary.signal is not None:
            self.obey(boundary.signal)

    # -- boundaries ---------------------------------------------------------------------------------------------
    def _agree(self, index: int) -> None:
        """Exchange with the other ranks. The step's metrics are made known where a log boundary falls on this step, or
        where a scheduler that steps now watches them; they are written at log boundaries only."""
        trainer = self.trainer
        phase.current.name = phase.BOUNDARY
        clock = perf_counter()
        at_log = self.boundary.log_due()
        known = at_log or self.schedules.plateau_due
        of = None if trainer.meanings.live_metrics else index
        exchange = self.boundary.agree(self.metrics, self.metrics.step_columns(of) if known else None)
        if at_log:
            self.boundary.logged = self.global_step
        if known:
            trainer.published.publish(exchange, step=self.global_step - 1, write=at_log)
        self.timing.add("communication", clock)

    def combine_step(self) -> None:
        """Make known what the ranks combine of the step at hand, before the boundary at which it is written: for a
        callback of Lightning's meanings that decides by it. All ranks come here at the same step."""
        if self.boundary.alone or not self.trainer.meanings.live_metrics:
            return
        exchange = self.boundary.agree(self.metrics, self.metrics.step_columns(None))
        self.trainer.published.publish(exchange, step=self.global_step - 1, write=False)
        self.boundary.keep_log_step()

    def obey(self, signal: int | None) -> None:
        """Save and leave when the ranks agreed on a signal."""
        if signal is not None:
            self.trainer.interrupt(signal)
