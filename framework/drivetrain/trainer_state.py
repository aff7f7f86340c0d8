"""Where a run stands, as users and callbacks read it from the Trainer. Names and meanings are Lightning's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from drivetrain.callback import Callback
from drivetrain.launch import Job
from drivetrain.logger import Logger

if TYPE_CHECKING:
    from drivetrain.loops.evaluate import EvaluateLoop
    from drivetrain.loops.fit import FitLoop
    from drivetrain.module import TrainModule
    from drivetrain.optimizer import TrainOptimizer
    from drivetrain.precision import Precision
    from drivetrain.sharding import BatchSource
    from drivetrain.strategy import Strategy


class TrainerState:
    """Read-only view of a Trainer's state; :class:`drivetrain.Trainer` derives from it."""

    lightning_module: TrainModule
    fit_loop: FitLoop
    job: Job | None
    strategy: Strategy
    precision_plugin: Precision
    loggers: list[Logger]
    callbacks: list[Callback]
    default_root_dir: Path
    evaluating: bool
    sanity_checking: bool
    stage: str | None
    status: str
    validation: EvaluateLoop | None
    evaluation: EvaluateLoop | None
    train_source: BatchSource | None
    num_sanity_val_steps: int
    max_epochs: int
    max_steps: int
    accumulate_grad_batches: int
    _adopted: dict[str, Any]

    @property
    def model(self) -> TrainModule | None:
        return self.lightning_module

    @property
    def current_epoch(self) -> int:
        fit = self.fit_loop
        return self._adopted.get("current_epoch", 0) if fit is None else fit.epoch + fit.cut

    @property
    def global_step(self) -> int:
        """Optimizer steps done; several optimizers stepped on one batch count once."""
        return self._adopted.get("global_step", 0) if self.fit_loop is None else self.fit_loop.global_step

    @property
    def optimizers(self) -> list[Optimizer]:
        return [] if self.fit_loop is None else self.fit_loop.optimizers

    @property
    def wrapped_optimizers(self) -> list[TrainOptimizer]:
        return [] if self.fit_loop is None else self.fit_loop.wrapped

    @property
    def global_rank(self) -> int:
        return 0 if self.job is None else self.job.rank

    @property
    def local_rank(self) -> int:
        return 0 if self.job is None else self.job.local_rank

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def communicator(self) -> Any:
        return self.strategy.communicator

    @property
    def precision(self) -> str:
        return self.precision_plugin.name

    @property
    def logger(self) -> Logger | None:
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> Path | None:
        return self.loggers[0].log_dir if self.loggers else self.default_root_dir

    @property
    def checkpoint_dir(self) -> Path:
        return (self.log_dir or self.default_root_dir) / "checkpoints"

    @property
    def checkpoint_callbacks(self) -> list[Callback]:
        return [callback for callback in self.callbacks if callback.saves_checkpoints]

    @property
    def checkpoint_callback(self) -> Any:
        found = self.checkpoint_callbacks
        return found[0] if found else None

    @property
    def early_stopping_callback(self) -> Any:
        return next((c for c in self.callbacks if hasattr(c, "patience") and hasattr(c, "stopped_epoch")), None)

    @property
    def progress_bar_callback(self) -> Any:
        return next((c for c in self.callbacks if hasattr(c, "print")), None)

    @property
    def validating(self) -> bool:
        return self.evaluating and self.stage in ("fit", "validate") and not self.sanity_checking

    @property
    def testing(self) -> bool:
        return self.evaluating and self.stage == "test"

    @property
    def predicting(self) -> bool:
        return self.evaluating and self.stage == "predict"

    @property
    def interrupted(self) -> bool:
        return self.status == "interrupted"

    @property
    def is_last_batch(self) -> bool:
        return self.fit_loop is not None and self.fit_loop.is_last_batch

    @property
    def between_steps(self) -> bool:
        """False among the micro-batches of an accumulation window, where a checkpoint would lose gradients."""
        return self.fit_loop is None or self.fit_loop.between_steps

    @property
    def last_batch_size(self) -> int:
        return 0 if self.fit_loop is None else self.fit_loop.last_batch_size

    @property
    def agreed_seconds(self) -> float:
        return 0.0 if self.fit_loop is None else self.fit_loop.boundary.agreed_seconds

    @property
    def has_validation(self) -> bool:
        return self.validation is not None

    @property
    def num_training_batches(self) -> int | float:
        return 0 if self.train_source is None else self.train_source.length

    @property
    def num_val_batches(self) -> list[int | float]:
        return [] if self.validation is None else [source.length for source in self.validation.sources]

    @property
    def num_test_batches(self) -> list[int | float]:
        return [] if self.evaluation is None else [source.length for source in self.evaluation.sources]

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        steps = self.num_sanity_val_steps
        return [length if steps == -1 else min(steps, length) for length in self.num_val_batches]

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps that ``fit`` will make; a schedule laid out for so many ends with training."""
        if self.max_epochs == -1:
            return float("inf") if self.max_steps == -1 else self.max_steps
        per_epoch = self.num_training_batches
        if per_epoch == float("inf"):
            return self.max_steps if self.max_steps != -1 else per_epoch
        windows = 1 if self.strategy.support.rounds else -(-int(per_epoch) // self.accumulate_grad_batches)
        steps = windows * max(self.max_epochs, 1)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)
