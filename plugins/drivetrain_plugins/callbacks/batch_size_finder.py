"""BatchSizeFinder: the largest batch size that fits into memory."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from drivetrain import stage_data
from drivetrain.callback import Callback
from drivetrain.checkpoint import rng
from drivetrain.dependent_options import Dependent
from drivetrain.errors import ConfigurationError, EndStage, nearest
from drivetrain.sharding import BatchSource
from drivetrain_plugins.tuner import attributes
from drivetrain_plugins.tuner.trial import Trial

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer

log = logging.getLogger(__name__)
MODES = ("power", "binsearch")
_LOADER_OF = {"validate": "val", "test": "test", "predict": "predict"}


class BatchSizeFinder(Callback):
    """Arguments and meaning are Lightning's; it works under several workers too, if each holds the whole module.

    Sizes are tried with the module's own loaders, which must read the size from the attribute ``batch_arg_name`` of the
    module, the data module or their hparams. With Lightning's meanings a trial in one process that comes to an epoch's
    end validates on as many batches, whatever the limits of the fit. Where there are several workers, the first size is
    tried in full steps; for larger ones each worker runs forward and backward by itself, so that none waits for one
    that is out of memory, and the size that is taken is one that fits on all.

    Args:
        mode: ``"power"``: double until memory is out, and take the one before. ``"binsearch"``: then search between.
        steps_per_trial: steps with each size.
        init_val: the first size.
        max_trials: sizes at most.
        batch_arg_name: name of the attribute.
        margin: share of the found size to leave off, with ``"binsearch"``.
        max_val: size at most.

    Attributes:
        optimal_batch_size: what was found.

    Raises:
        ConfigurationError: loaders passed by hand, several evaluation loaders, no such attribute, a strategy that
            shares out the module.
    """

    dependents = (Dependent("margin", {".mode": "binsearch"}),)

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        if mode.lower() not in MODES:
            raise ConfigurationError(f"BatchSizeFinder(mode={mode!r}): {nearest(mode, MODES)}")
        if not 0.0 <= margin < 1.0:
            raise ConfigurationError(f"BatchSizeFinder(margin={margin}): give a share from 0.0 to less than 1.0.")
        self.optimal_batch_size: int | None = init_val
        self._mode = mode.lower()
        self._steps_per_trial = steps_per_trial
        self._init_val = init_val
        self._max_trials = max_trials
        self._batch_arg_name = batch_arg_name
        self._margin = margin
        self._max_val = max_val
        self._early_exit = False  # of the Tuner, which wants nothing else of the stage

    # -- when ---------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str | None = None) -> None:
        request = trainer.request
        assert request is not None
        if any(loader is not None for loader in request.loaders.values()):
            raise ConfigurationError(
                f"BatchSizeFinder cannot change the batch size of loaders passed to {trainer.stage}(): define them in"
                f" {type(pl_module).__name__} or a data module."
            )
        attributes.get(trainer, self._batch_arg_name)
        if trainer.strategy.data.lockstep or not (trainer.strategy.support.replicated or trainer.world_size == 1):
            raise ConfigurationError(
                f"BatchSizeFinder cannot try sizes under strategy={trainer.strategy_name}, whose workers do not each"
                " have the whole state between steps: use strategy=ddp, or set the size by hand."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self.scale_batch_size(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if trainer.stage == "validate":
            self.scale_batch_size(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self.scale_batch_size(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self.scale_batch_size(trainer, pl_module)

    # -- the search ---------------------------------------------------------------------------------------------
    def scale_batch_size(self, trainer: Trainer, pl_module: TrainModule) -> None:
        """Search now; every rank comes here at the same moment of a run."""
        if trainer.fast_dev_run:
            warnings.warn("fast_dev_run: the batch size is not searched for.", stacklevel=2)
        elif trainer.stage == "fit":
            # Lightning's search goes on from the random numbers at hand: what is drawn after it depends on it.
            keeps = trainer.meanings.order != "torch"
            # Where a trial comes to an epoch's end it validates, which may draw. Workers by themselves cannot.
            validates = trainer.meanings.trials == "validate" and trainer.world_size == 1
            limits = trainer.limit_train_batches, trainer.limit_val_batches
            trainer.limit_train_batches, trainer.limit_val_batches = 1.0, self._steps_per_trial
            try:
                with Trial(trainer, [], validates=validates, keeps_random=keeps) as trial:
                    size = self._search(trainer, lambda: self._fits_training(trainer, trial))
            finally:
                trainer.limit_train_batches, trainer.limit_val_batches = limits
            self._take(trainer, size)
        else:
            sources = self._evaluation(trainer)
            with rng.kept():
                size = self._search(trainer, lambda: self._fits_evaluation(trainer))
            self._take(trainer, size)
            sources[:] = stage_data.sources(trainer, trainer.request, _LOADER_OF[trainer.stage or ""])  # type: ignore[arg-type]
        if self._early_exit:
            raise EndStage

    def _take(self, trainer: Trainer, size: int) -> None:
        if self._mode == "binsearch" and self._margin:
            size = max(1, int(size * (1 - self._margin)))
        self.optimal_batch_size = size
        attributes.put(trainer, self._batch_arg_name, size)
        if trainer.stage == "fit":
            source = stage_data.sources(trainer, trainer.request, "train")[0]  # type: ignore[arg-type]
            trainer.train_source = trainer.fit_loop.data.source = source
            if not self._fitted_last:
                source.open(keep=False)  # as Lightning does before a next trial, also where none comes
            source.open()  # at once, as Lightning does: it may draw
            _ask_for_validation(trainer)
        if trainer.is_global_zero:
            log.info("batch size set to %d", size)

    def _search(self, trainer: Trainer, fits: Any) -> int:
        """The largest size that ``fits()``, as the mode searches for it."""
        size, good, bad, trials = min(self._init_val, self._max_val), 0, 0, 0
        self._whole_steps = self._fitted_last = True
        while trials < self._max_trials:
            attributes.put(trainer, self._batch_arg_name, size)
            fitted = self._fitted_last = fits()
            trials += fitted or self._mode == "power"  # as in Lightning: a bisection counts what fits
            if fitted:
                good = size
                if size >= min(self._max_val, self._samples):
                    break
            else:
                bad = size
            self._whole_steps = False
            if bad:
                if (self._mode == "power" and good) or bad - good <= 1:
                    break
                size = (max(good, 1) + bad) // 2 if self._mode == "binsearch" else bad // 2
            else:
                size = min(size * 2, self._max_val)
        if not (good or bad):  # none was to be tried
            return size
        if not good:
            raise ConfigurationError(
                f"BatchSizeFinder: not even batches of {bad} fit into memory: make the module smaller."
            )
        return good

    def _agreed(self, trainer: Trainer, fitted: bool) -> bool:
        """Whether the size fits on all ranks."""
        _free()
        return all(trainer.strategy.communicator.all_gather_plain(fitted))

    def _fits_training(self, trainer: Trainer, trial: Trial) -> bool:
        fitted = True
        source = trial.source()
        _ask_for_validation(trainer)
        self._samples = _samples(source)
        try:
            if trainer.strategy.communicator.world_size == 1 or self._whole_steps:
                trial.train(self._steps_per_trial, source)
            else:
                self._alone(trainer, source)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            fitted = False
        for optimizer in trial.optimizers:
            optimizer.zero_grad()
        return self._agreed(trainer, fitted)

    def _alone(self, trainer: Trainer, source: BatchSource) -> None:
        """Forward and backward without the other ranks; what does not depend on the batch is in memory already."""
        module, strategy = trainer.lightning_module, trainer.strategy
        trainer.metrics = trainer.new_metrics()
        for number, micro in enumerate(source):
            if number == self._steps_per_trial:
                return
            trainer.metrics.batch = micro
            trainer.hooks.current = "training_step"
            call = partial(_with_index, module.training_step, micro.index)
            output = strategy.forward(call, trainer.to_device(micro))
            trainer.hooks.current = None
            loss = output["loss"] if isinstance(output, dict) else output
            if loss is not None:
                loss.backward()

    def _evaluation(self, trainer: Trainer) -> list[BatchSource]:
        loop = trainer.predict_loop if trainer.stage == "predict" else trainer.evaluation
        assert loop is not None
        if len(loop.sources) > 1:
            raise ConfigurationError(
                f"BatchSizeFinder cannot search with the {len(loop.sources)} loaders of {trainer.stage}: give one."
            )
        return loop.sources

    def _fits_evaluation(self, trainer: Trainer) -> bool:
        module, strategy, stage = trainer.lightning_module, trainer.strategy, trainer.stage or ""
        source = stage_data.sources(trainer, trainer.request, _LOADER_OF[stage])[0]  # type: ignore[arg-type]
        self._samples = _samples(source)
        step = getattr(module, "validation_step" if stage == "validate" else f"{stage}_step")
        former, trainer.metrics = trainer.metrics, trainer.new_metrics()
        fitted = True
        try:
            for number, micro in enumerate(source):
                if number == self._steps_per_trial:
                    break
                trainer.metrics.batch = micro
                trainer.hooks.current = step.__name__
                strategy.evaluation_step(partial(_with_index, step, micro.index), trainer.to_device(micro))
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            fitted = False
        finally:
            trainer.metrics, trainer.hooks.current = former, f"on_{stage}_start"
        return self._agreed(trainer, fitted)

    def state_dict(self) -> dict[str, Any]:
        return {"optimal_batch_size": self.optimal_batch_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimal_batch_size = state_dict["optimal_batch_size"]


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that a device, or this machine, has no memory left."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    text = str(error)
    return "CUDA out of memory" in text or "DefaultCPUAllocator: can't allocate memory" in text


def _with_index(step: Callable[..., Any], index: int, batch: Any) -> Any:
    return step(batch, index)


def _ask_for_validation(trainer: Trainer) -> None:
    """The loaders that a fit validates with, asked for anew: they may be of another size now."""
    if trainer.validation is not None and trainer.validation.sources:
        trainer.validation.sources[:] = stage_data.sources(trainer, trainer.request, "val")  # type: ignore[arg-type]


def _samples(source: BatchSource) -> int | float:
    """Samples of the data set; infinite for a stream."""
    dataset = getattr(source.loader, "dataset", None)
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return float("inf")


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
