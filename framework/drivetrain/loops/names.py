"""What projects read and set of Lightning's training loops, whether or not the loop of a fit is there yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from drivetrain.combined import CombinedLoader
from drivetrain.errors import ConfigurationError
from drivetrain.loops.evaluation_names import Count, DataSource, NoEvaluation, Progress

if TYPE_CHECKING:
    from drivetrain.loops.limits import Limits
    from drivetrain.loops.optimize import Optimization
    from drivetrain.loops.training_data import TrainingData
    from drivetrain.trainer import Trainer


class LoadersOfFit(CombinedLoader):
    """The loaders that a fit reads, as Lightning's loop holds them. To set ``flattened`` is to train on others in the
    epochs to come; the fit's first one is open before it begins."""

    def __init__(self, data: TrainingData) -> None:
        given = data.given
        if isinstance(given, CombinedLoader):
            super().__init__(given.iterables, given.mode)
        else:
            super().__init__(given, "max_size_cycle")
        self._data, self._given = data, given

    @property
    def flattened(self) -> list[Any]:
        return self._flattened

    @flattened.setter
    def flattened(self, loaders: list[Any]) -> None:
        CombinedLoader.flattened.fset(self, loaders)  # type: ignore[attr-defined]
        if isinstance(self._given, CombinedLoader):
            self._given.flattened = loaders  # which the project may give again
        self._data.replace(self._given if isinstance(self._given, CombinedLoader) else self.iterables)


class EpochCount:
    """Epochs of a run. To set ``completed`` or ``processed`` is to go on from that epoch."""

    def __init__(self, loop: LoopNames) -> None:
        self._loop = loop

    @property
    def completed(self) -> int:
        return self._loop.trainer.current_epoch

    @completed.setter
    def completed(self, epoch: int) -> None:
        self._loop.begin_at(epoch)

    @property
    def ready(self) -> int:
        """With the one at hand."""
        return self.completed + self._loop.in_epoch

    started = ready

    @property
    def processed(self) -> int:
        return self.completed + self._loop.epoch_is_over

    @processed.setter
    def processed(self, epoch: int) -> None:
        self._loop.begin_at(epoch)


class EpochProgress:
    """Epochs of a run, of which there is one count."""

    def __init__(self, loop: LoopNames) -> None:
        self._loop = loop
        self.current = self.total = EpochCount(loop)

    def reset(self) -> None:
        """Begin with the first one, as projects let a Trainer fit again from nothing."""
        self._loop.begin_at(0)


class StepCount:
    """Steps of the optimizers of a run. To set ``completed`` is to count on from there, as projects do that step
    torch's own optimizers by hand, which nobody else counts."""

    def __init__(self, loop: LoopNames) -> None:
        self._loop = loop

    @property
    def completed(self) -> int:
        return self._loop.trainer.global_step

    @completed.setter
    def completed(self, steps: int) -> None:
        self._loop.count_from(steps)

    @property
    def ready(self) -> int:
        return self.completed

    @ready.setter
    def ready(self, steps: int) -> None:
        """Passed over: a step that is begun counts where it is completed."""


class StepProgress:
    """Steps of a run's optimizers, of which there is one count."""

    def __init__(self, loop: LoopNames) -> None:
        self._loop = loop
        self.current = self.total = StepCount(loop)

    def reset(self) -> None:
        """None was made."""
        self._loop.count_from(0)


class ScheduleProgress:
    """Steps of a run's schedules, which nobody counts here: there is nothing to set back."""

    def reset(self) -> None:
        """Nothing changes."""


class BatchesOfFit(Progress):
    """A fit's batches, as they stand; to reset them is to let the fit begin their count over epochs anew."""

    def __init__(self, loop: RunningLoop, current: Count, total: Count) -> None:
        super().__init__(current, total, loop.is_last_batch)
        self._loop = loop

    def reset(self) -> None:
        super().reset()
        self._loop.batches_seen = 0


class OptimizerProgress:
    """What Lightning's automatic optimisation keeps of its optimizer."""

    def __init__(self, loop: LoopNames) -> None:
        self._loop = loop
        self.optimizer = self
        self.step = StepProgress(loop)
        self.reset = self.step.reset

    @property
    def optimizer_steps(self) -> int:
        return self._loop.trainer.global_step


class OptimizationNames:
    """Lightning's two loops around a step, under either of their names for the count of steps."""

    def __init__(self, loop: LoopNames) -> None:
        self.optim_progress = OptimizerProgress(loop)
        self.optim_step_progress = self.optim_progress.step


def of_ones_own(name: str) -> ConfigurationError:
    """What is said of a loop that a project makes by itself."""
    return ConfigurationError(
        f"{name} is a loop of the project's own, and those of the Trainer are not replaced here: do it in hooks, in a"
        " strategy's run_epoch (docs/architecture.md), or in a loop by hand (docs/by_hand.md)."
    )


class LoopNames:
    """The limits of a run, which are the Trainer's, and its progress, under the names of Lightning's loops."""

    trainer: Trainer
    epoch_is_over = in_epoch = False

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        if cls is LoopNames or cls.__module__.partition(".")[0] != "drivetrain":
            raise of_ones_own("_FitLoop" if cls is LoopNames else cls.__name__)
        return super().__new__(cls)

    if TYPE_CHECKING:

        def begin_at(self, epoch: int) -> None: ...

        def count_from(self, steps: int) -> None: ...

        @property
        def batch_progress(self) -> Progress: ...

    @property
    def epoch_progress(self) -> EpochProgress:
        return EpochProgress(self)

    @property
    def scheduler_progress(self) -> ScheduleProgress:
        return ScheduleProgress()

    @property
    def _data_source(self) -> DataSource:
        return DataSource(self.trainer, "train")

    @property
    def max_batches(self) -> int | float:
        """Batches of an epoch, infinite where that is not known."""
        return self.trainer.num_training_batches

    def _should_accumulate(self) -> bool:
        """Whether the batch at hand only gathers gradients, and another one closes its window (the name is
        Lightning's)."""
        progress: Progress = self.batch_progress
        whole = progress.current.ready % self.trainer.accumulate_grad_batches == 0
        return not (whole or progress.is_last_batch)

    @property
    def manual_optimization(self) -> OptimizationNames:
        """Lightning's loop around the steps that a module makes by hand, for the count of them."""
        return OptimizationNames(self)

    @property
    def automatic_optimization(self) -> OptimizationNames:
        """Lightning's loop around the steps that the Trainer makes, for the count of them."""
        return OptimizationNames(self)

    @property
    def val_loop(self) -> Any:
        """What validates within the fit."""
        return self.trainer.validation or NoEvaluation(self.trainer, "val")

    @val_loop.setter
    def val_loop(self, loop: Any) -> None:
        raise of_ones_own(type(loop).__name__)

    @property
    def epoch_loop(self) -> Self:
        """Lightning's loop of one epoch, here the same object."""
        return self

    @epoch_loop.setter
    def epoch_loop(self, loop: Any) -> None:
        if loop is not self:
            raise of_ones_own(type(loop).__name__)

    @property
    def max_epochs(self) -> int:
        return self.trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self.trainer.max_epochs = -1 if value is None else value

    @property
    def min_epochs(self) -> int | None:
        return self.trainer.min_epochs

    @min_epochs.setter
    def min_epochs(self, value: int | None) -> None:
        self.trainer.min_epochs = value

    @property
    def max_steps(self) -> int:
        return self.trainer.max_steps

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        self.trainer.max_steps = value

    @property
    def min_steps(self) -> int | None:
        return self.trainer.min_steps

    @min_steps.setter
    def min_steps(self, value: int | None) -> None:
        self.trainer.min_steps = value


class RunningLoop(LoopNames):
    """What the loop of a fit answers to these names, from where it stands."""

    epoch: int
    batch_idx: int
    global_step: int
    batches_seen: int
    in_batch: bool
    is_last_batch: bool
    ended: bool
    resumed: bool
    limits: Limits
    optimization: Optimization
    data: TrainingData

    @property
    def _combined_loader(self) -> CombinedLoader:
        return LoadersOfFit(self.data)

    def setup_data(self) -> None:
        """Ask for the training loaders now, where that was not done yet."""
        self.trainer.open_training_data()

    @property
    def total_batch_idx(self) -> int:
        """Number of the batch at hand, counted over epochs."""
        return self.batches_seen - (not self.in_batch)

    @property
    def batch_progress(self) -> Progress:
        """Counts of batches."""
        done, total = self.batch_idx + 1 - self.in_batch, self.batches_seen
        taken = self.in_batch
        current = Count(done + taken, done + taken, done, done)
        return BatchesOfFit(self, current, Count(total + taken, total + taken, total, total))

    @property
    def epoch_is_over(self) -> bool:  # type: ignore[override]
        return self.ended

    def begin_at(self, epoch: int) -> None:
        """Go on from this epoch."""
        self.epoch = epoch

    def count_from(self, steps: int) -> None:
        """Let the steps of optimizers that are done be so many."""
        self.optimization.steps = steps

    @property
    def done(self) -> bool:
        """Whether the limits are reached."""
        return self.limits.over()

    skip = done

    @property
    def restarting(self) -> bool:
        """Whether the run goes on within an epoch of a checkpoint."""
        return self.resumed

    def _counts_later(self) -> bool:
        trainer = self.trainer
        return trainer.between_steps and (trainer.validating or trainer.hooks.current == "on_train_batch_end")

    @property
    def _batches_that_stepped(self) -> int:
        """Steps that rows of loggers stand beside: as in Lightning, at the end of a batch and in the validation
        that follows it not yet with its own."""
        return self.global_step - self._counts_later()

    @_batches_that_stepped.setter
    def _batches_that_stepped(self, steps: int) -> None:
        """What loggers' rows stand beside, from here on."""
        self.global_step = steps + self._counts_later()


class LoopToCome(LoopNames):
    """Stands for the loop of a fit until that is there: before the first fit, and in a fit's first hooks; and for one
    that workers did, which have ended."""

    _combined_loader = None
    skip = restarting = False

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @property
    def done(self) -> bool:
        """Whether a fit would end at once."""
        return self.trainer.max_steps == 0 or self.trainer.max_epochs == 0

    def begin_at(self, epoch: int) -> None:
        """Let the next fit go on from this epoch."""
        self.trainer._adopted = {**self.trainer._adopted, "current_epoch": epoch}

    def count_from(self, steps: int) -> None:
        """Let the next fit count on from so many steps of optimizers."""
        self.trainer._adopted = {**self.trainer._adopted, "optimizer_steps": steps}

    @property
    def batch_progress(self) -> Progress:
        done, total = self.trainer.batches_of_epoch, self.trainer._adopted.get("batches_seen", 0)
        return Progress(Count(done, done, done, done), Count(total, total, total, total), self.is_last_batch)

    @property
    def batch_idx(self) -> int:
        return self.trainer.batches_of_epoch - 1

    @property
    def total_batch_idx(self) -> int:
        return self.trainer._adopted.get("batches_seen", 0) - 1

    @property
    def is_last_batch(self) -> bool:
        return self.trainer.is_last_batch

    @property
    def global_step(self) -> int:
        return self.trainer.global_step

    @property
    def _batches_that_stepped(self) -> int:
        return self.trainer.batches_stepped

    def setup_data(self) -> None:
        """Ask for the training loaders now, where a fit has begun and they are not there yet."""
        self.trainer.open_training_data()
