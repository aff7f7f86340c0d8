"""Where a run stands, as users and callbacks read it from the Trainer. Names and meanings are Lightning's."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer

from drivetrain import stage_data, states
from drivetrain.callback import Callback
from drivetrain.checkpoint.io import CheckpointIO
from drivetrain.configuration import Configuration
from drivetrain.errors import ConfigurationError
from drivetrain.launch import signals
from drivetrain.logger import Logger
from drivetrain.loops.evaluation_names import Progress
from drivetrain.loops.names import LoopToCome
from drivetrain.published import PublishedMetrics
from drivetrain.states import RunningStage, TrainerFn, TrainerStatus
from drivetrain.strategy import Strategy
from drivetrain.timing import Timing

if TYPE_CHECKING:
    from drivetrain.data import DataModule
    from drivetrain.hooks import Hooks
    from drivetrain.left_state import LeftState
    from drivetrain.loops.evaluate import EvaluateLoop
    from drivetrain.loops.fit import FitLoop
    from drivetrain.loops.predict import PredictLoop
    from drivetrain.metrics import Metrics
    from drivetrain.module import TrainModule
    from drivetrain.optimizer import SchedulerConfig, TrainOptimizer
    from drivetrain.profiling import Instruments
    from drivetrain.request import Request
    from drivetrain.sharding import BatchSource
    from drivetrain.trainer import Trainer
    from drivetrain.transfer import Transfer


def _during(stage: RunningStage) -> property:
    """Whether ``stage`` is running. Callbacks that evaluate by themselves set it, and False leaves it only where it is
    that one, as in Lightning."""

    def get(trainer: TrainerState) -> bool:
        return trainer.doing is stage

    def put(trainer: TrainerState, running: bool) -> None:
        if running:
            trainer.doing = stage
        elif trainer.doing is stage:
            trainer.doing = None

    return property(get, put)


class TrainerState(Configuration):
    """A Trainer's state and the read-only view of it; :class:`drivetrain.Trainer` derives from it."""

    doing: RunningStage | None
    training = _during(RunningStage.TRAINING)
    sanity_checking = _during(RunningStage.SANITY_CHECKING)
    validating = _during(RunningStage.VALIDATING)
    testing = _during(RunningStage.TESTING)
    predicting = _during(RunningStage.PREDICTING)

    def _fresh_state(self) -> None:
        """As it is before the first run."""
        self.status = "idle"
        self.stage: str | None = None
        self.doing = None
        self.fitted = False
        self.should_stop = False
        self.stop_wish: str | None = None
        self.hooks: Hooks = None  # type: ignore[assignment]  # set when a module is attached
        self.metrics: Metrics = None  # type: ignore[assignment]
        self.lightning_module: TrainModule = None  # type: ignore[assignment]
        self.datamodule: DataModule | None = None
        self.request: Request | None = None
        self.loop: FitLoop | None = None
        self.train_source: BatchSource | None = None
        self.predict_sources: list[BatchSource] = []
        self.test_sources: list[BatchSource] = []
        self.instruments: Instruments | None = None
        self.predict_loop: PredictLoop = None  # type: ignore[assignment]
        self.before_setup: dict[str, Any] = {}  # the random generators' states, before the data module's ``setup``
        self._given: dict[str, Any] = {}  # evaluation loaders as they were given
        self._read_elsewhere: dict[str, Request] = {}  # which data workers read, and what they were asked
        self.validation: EvaluateLoop | None = None
        self.evaluation: EvaluateLoop | None = None
        self.val_check_batch: int | float = float("inf")
        self._lr_scheduler_configs: list[SchedulerConfig] = []
        self.timing = Timing()
        self.loss_curve: list[tuple[int, float]] = []
        self.published = PublishedMetrics(cast("Trainer", self))
        self._terminated = False  # the last stage was ended by SIGTERM
        self.random_state: dict[str, Any] | None = None
        self.random_after_fit: dict[str, Any] | None = None  # the generators' states, where they are put back after it
        self.data_seed = 0
        self.ckpt_path: str | None = None
        self._adopted: dict[str, int] = {}  # the counters of earlier calls of fit
        self.batches_of_epoch = 0  # of the last epoch that workers trained
        self.left_state: LeftState | None = None  # of the last fit, where workers did it
        self._counted: dict[str, Any] = {}  # batches of each kind of data in an earlier call
        self._progress: dict[str, Progress] = {}
        self._modes: dict[str, bool] = {}
        self._consensus = 0
        self.to_device: Transfer = None  # type: ignore[assignment]

    @property
    def fit_loop(self) -> FitLoop:
        """The loop of the fit at hand, or of the last one in this process; there is none before the first. Of one that
        workers did there are the counts and limits."""
        if self.loop is None and self._ended_elsewhere:
            return LoopToCome(cast("Trainer", self))  # type: ignore[return-value]
        return self.loop  # type: ignore[return-value]

    @property
    def model(self) -> TrainModule | None:
        return self.lightning_module

    @property
    def current_epoch(self) -> int:
        fit = self.loop
        if fit is None:
            return self._adopted.get("current_epoch", 0)
        before = self.sanity_checking or fit.data.asking
        return fit.epoch + (fit.cut or (fit.resumed and fit.ended and not before))

    @property
    def global_step(self) -> int:
        """Optimizer steps done; several optimizers stepped on one batch count once, under Lightning's meanings each."""
        if self.loop is not None:
            return self.loop.counted_steps
        return self._adopted.get("optimizer_steps" if self.meanings.steps == "optimizer" else "global_step", 0)

    @property
    def handed_over(self) -> bool:
        """Whether the last stage ran in workers that this process started, and that have ended."""
        return self.job is None and self.world_size > 1

    @property
    def batches_stepped(self) -> int:
        """Batches (windows) on which optimizers stepped: what metrics are written beside."""
        return self._adopted.get("global_step", 0) if self.loop is None else self.loop.global_step

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Who writes checkpoints that are one file."""
        return self.strategy.checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointIO) -> None:
        self.strategy.checkpoint_io = checkpoint_io

    @property
    def optimizers(self) -> list[Optimizer]:
        self._tell_of_ended("optimizers")
        return [] if self.loop is None else self.loop.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        """Step these from here on.

        Raises:
            ConfigurationError: there is no fit, or its strategy made optimizers of its own out of the module's.
        """
        if self.loop is None or type(self.strategy).build_optimizers is not Strategy.build_optimizers:
            raise ConfigurationError(
                "trainer.optimizers is set within a fit, under strategies that step optimizers as they are: return them"
                " from configure_optimizers."
            )
        self.loop.use(list(optimizers))

    @property
    def wrapped_optimizers(self) -> list[TrainOptimizer]:
        self._tell_of_ended("optimizers")
        return [] if self.loop is None else self.loop.optimization.wrapped

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The schedulers of the fit and when they step."""
        self._tell_of_ended("lr_scheduler_configs")
        return self._lr_scheduler_configs

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, configs: list[SchedulerConfig]) -> None:
        self._lr_scheduler_configs = configs

    @property
    def _ended_elsewhere(self) -> bool:
        """Whether others did the last fit: workers that have ended, or ranks that train, where this one serves."""
        return self.loop is None and self.fitted and (self.handed_over or not self.strategy.trains)

    def _tell_of_ended(self, name: str) -> None:
        if self._ended_elsewhere:
            warnings.warn(
                f"trainer.{name} is empty, since the workers that trained have ended with theirs: read them in a"
                " callback's on_train_end, or their states in a checkpoint.",
                stacklevel=3,
            )

    @property
    def global_rank(self) -> int:
        return 0 if self.job is None else self.job.rank

    @property
    def local_rank(self) -> int:
        return 0 if self.job is None else self.job.local_rank

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """What was logged, by name; of what is logged by step and by epoch the epoch's value also without suffix."""
        return self.published.callback

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """What the loggers are given."""
        return self.published.logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What the progress bar shows, as numbers."""
        return self.published.bar

    def monitored(self, name: str) -> torch.Tensor | None:
        """The metric ``name``, the same on all ranks, for decisions that they must make alike; None where there is
        none. Of what was logged without ``sync_dist`` it is the first rank's."""
        return self.published.monitored(name)

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
    def loggers(self) -> list[Logger]:
        return self._loggers

    @loggers.setter
    def loggers(self, loggers: list[Logger] | None) -> None:
        self._loggers = [] if loggers is None else loggers

    @property
    def logger(self) -> Logger | None:
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]

    @property
    def log_dir(self) -> str | Path | None:
        if not self.loggers:
            return self.default_root_dir
        return getattr(self.loggers[0], "log_dir", None) or self.loggers[0].save_dir

    @property
    def checkpoint_dir(self) -> Path:
        folder = getattr(self.loggers[0], "log_dir", None) if self.loggers else None
        return Path(folder or self.default_root_dir) / "checkpoints"

    @property
    def checkpoint_callbacks(self) -> list[Callback]:
        return [callback for callback in self.callbacks if callback.saves_checkpoints]

    @property
    def checkpoint_callback(self) -> Any:
        found = self.checkpoint_callbacks
        return found[0] if found else None

    @property
    def early_stopping_callback(self) -> Any:
        found = self.early_stopping_callbacks
        return found[0] if found else None

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        return [c for c in self.callbacks if hasattr(c, "patience") and hasattr(c, "stopped_epoch")]

    @property
    def progress_bar_callback(self) -> Any:
        return next((c for c in self.callbacks if c.shows_progress), None)

    @property
    def evaluating(self) -> bool:
        """Whether it validates, tests or checks before training that validation runs."""
        return self.doing is not None and self.doing.evaluating

    @property
    def interrupted(self) -> bool:
        """Whether the last stage ended before its time: of an error or a signal."""
        return self.status in ("interrupted", "failed")

    @property
    def received_sigterm(self) -> bool:
        """Whether this process was asked to stop by SIGTERM; training stops at the next boundary. It stays so until the
        next stage begins."""
        return self._terminated or signals.pending() == signal.SIGTERM

    @property
    def state(self) -> states.TrainerState:
        """What is being done, in Lightning's words."""
        fn = TrainerFn(self.stage) if self.stage else None
        words = {"idle": "initializing", "running": "running", "interrupted": "interrupted", "failed": "interrupted"}
        return states.TrainerState(TrainerStatus(words.get(self.status, "finished")), fn, self.doing)

    @property
    def is_last_batch(self) -> bool:
        return bool(self._adopted.get("is_last_batch", False)) if self.loop is None else self.loop.is_last_batch

    @property
    def between_steps(self) -> bool:
        """False among the micro-batches of an accumulation window, where a checkpoint would lose gradients."""
        return self.loop is None or self.loop.between_steps

    @property
    def last_batch_size(self) -> int:
        return 0 if self.loop is None else self.loop.last_batch_size

    @property
    def agreed_seconds(self) -> float:
        return 0.0 if self.loop is None else self.loop.boundary.agreed_seconds

    @property
    def has_validation(self) -> bool:
        return self.validation is not None

    @property
    def enable_validation(self) -> bool:
        """Whether ``fit`` validates."""
        return self.validation is not None

    @property
    def has_lone_group(self) -> bool:
        """Whether a strategy for several processes has one, which is given a process group all the same."""
        return self.meanings.lone_group and self.strategy_name != "single" and self.world_size == 1

    def progress_of(self, stage: str) -> Progress:
        """Counts of the batches that this Trainer evaluated, or predicted, in all of its calls of ``stage``."""
        return self._progress.setdefault(stage, Progress())

    @property
    def num_training_batches(self) -> int | float:
        if self.train_source is not None:
            return self.train_source.length
        return self._counted.get("train", float("inf") if self.meanings.loaders == "needed" else 0)

    @property
    def num_val_batches(self) -> list[int | float]:
        loop = self.evaluation if self.stage == "validate" else self.validation
        found = None if loop is None else _lengths(loop.sources)
        return found or self._counted.get("val", [])

    @property
    def num_test_batches(self) -> list[int | float]:
        return _lengths(self.test_sources) or self._counted.get("test", [])

    @property
    def num_predict_batches(self) -> list[int | float]:
        return _lengths(self.predict_sources) or self._counted.get("predict", [])

    @property
    def train_dataloader(self) -> Any:
        """What the module, data module or caller gave to train on, or as it is dealt out to this rank: a loader, or
        several in their nesting."""
        return self._given_of("train") if self.train_source is None else self.train_source.given

    @property
    def val_dataloaders(self) -> Any:
        return self._given_of("val")

    @property
    def test_dataloaders(self) -> Any:
        return self._given_of("test")

    @property
    def predict_dataloaders(self) -> Any:
        return self._given_of("predict")

    def _given_of(self, which: str) -> Any:
        """Loaders as the project gave them, or as they are dealt out to this rank; of a CombinedLoader what it was made
        of. Those that workers read are asked for in this process when somebody wants to see them."""
        if which not in self._given and which in self._read_elsewhere:
            self._given[which] = stage_data.seen_here(self._read_elsewhere[which], which)
        return self._given.get(which)

    @property
    def limits(self) -> dict[str, int | float | None]:
        """Batches, or a fraction of them, to be read of each kind of data; None for all."""
        return {
            "train": self.limit_train_batches,
            "val": self.limit_val_batches,
            "test": self.limit_test_batches,
            "predict": self.limit_predict_batches,
        }

    @property
    def scaler(self) -> Any:
        """The gradient scaler of ``precision="16-mixed"``, else None."""
        return getattr(self.precision_plugin, "scaler", None)

    @property
    def device_ids(self) -> list[int]:
        """Numbers of the devices of this node's workers."""
        return list(self.gpus or range(self.num_devices))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """What a ``DistributedSampler`` of this rank takes; None under ``single``."""
        if self.strategy_name == "single":
            return None
        return {"num_replicas": self.strategy.data.size, "rank": self.strategy.data.rank}

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        steps = self.num_sanity_val_steps
        return [min(steps, length) for length in self.num_val_batches]

    def log_falls_on(self, step: int) -> bool:
        """Whether metrics are written after so many optimizer steps; never where ``log_every_n_steps`` is 0."""
        return self.log_every_n_steps > 0 and step % self.log_every_n_steps == 0

    def open_training_data(self) -> None:
        """In a fit: ask for the training loaders where they are not there, and open them before the first step, which
        may draw random numbers."""
        if self.stage == "fit" and self.status == "running":
            source = stage_data.training(cast("Trainer", self))
            if not source.opened:  # a further fit's is opened anew when it is read
                source.open(keep=self.current_epoch == 0)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps that ``fit`` will make; a schedule laid out for so many ends with training."""
        if self.max_epochs == -1:
            return float("inf") if self.max_steps == -1 else self.max_steps
        self.open_training_data()
        per_epoch = self.num_training_batches
        if per_epoch == float("inf"):
            return self.max_steps if self.max_steps != -1 else per_epoch
        windows = 1 if self.strategy.support.rounds else -(-int(per_epoch) // self.accumulate_grad_batches)
        steps = windows * max(self.max_epochs, 1)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)


def _lengths(sources: list[BatchSource]) -> list[int | float]:
    """Batches of each loader, also of those that one source reads at once."""
    return [length for source in sources for length in source.lengths]
