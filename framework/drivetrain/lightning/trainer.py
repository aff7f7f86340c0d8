"""Lightning's Trainer: drivetrain's, with Lightning's arguments, defaults and meanings."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

import drivetrain.trainer
from drivetrain.arguments import as_meant, by_name, unknown_argument
from drivetrain.callback import Callback
from drivetrain.compilation import uncompiled
from drivetrain.data import DataModule
from drivetrain.errors import ConfigurationError, PossibleUserWarning
from drivetrain.lightning import autologging, deep_names, passed_over
from drivetrain.lightning.accelerators import Accelerator, AcceleratorRegistry, CPUAccelerator, CUDAAccelerator
from drivetrain.lightning.connectors import _AcceleratorConnector, _CheckpointConnector, _LoggerConnector
from drivetrain.lightning.own_parts import as_ours, refuse_what_is_not_called, taken_as_callback
from drivetrain.lightning.plugins import CheckpointIO, ClusterEnvironment, environment_of, meant_by
from drivetrain.lightning.results import _ResultCollection
from drivetrain.lightning.seed import seed_everything as seed_everything
from drivetrain.lightning.strategies import Asked, StrategyRegistry, meaning_of
from drivetrain.lightning.utilities import GradClipAlgorithmType
from drivetrain.logger import Logger
from drivetrain.loops.evaluation_names import NoEvaluation
from drivetrain.loops.names import LoopToCome, of_ones_own
from drivetrain.loops.predict import PredictLoop
from drivetrain.meanings import LIGHTNING
from drivetrain.module import TrainModule
from drivetrain.precision import Precision
from drivetrain.profiler import Profiler
from drivetrain.rank_zero import rank_zero_warn
from drivetrain.request import Request

__path__: list[str] = []
_PREFIX = "PL_TRAINER_"
# As Lightning's: a command line refuses what is not among these names. In a script there may be others, registered by
# packages, and for the strategy a dictionary or a declaration of drivetrain's.
PrecisionName = Literal[
    64, 32, 16, "16-mixed", "bf16-true", "bf16-mixed", "32-true", "64-true", "64", "32", "16", "bf16"
]
Plugin = Precision | CheckpointIO | ClusterEnvironment


def _from_environment(init: Callable[..., None]) -> Callable[..., None]:
    """Let ``PL_TRAINER_MAX_EPOCHS=3`` and its like take the place of defaults; what is given in code stays."""
    parameters = [name for name, p in inspect.signature(init).parameters.items() if p.kind is p.KEYWORD_ONLY]

    @functools.wraps(init)
    def with_defaults(self: Any, *unnamed: Any, **given: Any) -> None:
        by_name(unnamed)
        for name in parameters:
            text = os.environ.get(f"{_PREFIX}{name.upper()}")
            if text is not None and name not in given:
                try:
                    given[name] = ast.literal_eval(text)
                except (ValueError, SyntaxError):
                    given[name] = text
        init(self, **as_meant(given))

    return with_defaults


def _connect(trainer: Trainer, joined: Any) -> None:
    """What ``trainer.strategy.connect`` is: given a module, it makes that the Trainer's, so that a script can save a
    checkpoint of it without a fit. What a strategy itself connects to is a job."""
    if not isinstance(joined, TrainModule):
        type(trainer.strategy).connect(trainer.strategy, joined)
        return
    trainer.lightning_module = joined
    joined.trainer = trainer


_ELSEWHERE = set(inspect.signature(drivetrain.trainer.Trainer.__init__).parameters) - {"self"}


class Trainer(drivetrain.trainer.Trainer):
    """Takes every argument of Lightning 2.6's Trainer, with its defaults and meanings, and drivetrain's own besides
    (``compression``, ``seed``, ``batch``, ``nonfinite``, ``compile``, ...; see :class:`drivetrain.Trainer`).

    What is not offered is refused in one sentence that names the way out; nothing is ignored. Environment variables
    ``PL_TRAINER_<ARGUMENT>`` override defaults.

    Raises:
        ConfigurationError: an argument or a combination that cannot run.
    """

    meanings = LIGHTNING
    _sync_batchnorm: bool

    @_from_environment
    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Asked = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: PrecisionName | Precision | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: list[Callback] | Callback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Plugin | list[Plugin] | None = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
        **more: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "more", "__class__")}
        for name in more:
            if name not in _ELSEWHERE:
                raise unknown_argument(name, {*given, *_ELSEWHERE})
        if given.pop("model_registry") is not None:
            raise ConfigurationError(
                f"model_registry={model_registry!r}: nothing is uploaded to a vendor's registry: leave it out and copy"
                " trainer.checkpoint_callback.best_model_path where you want it."
            )
        strategy, accelerator = StrategyRegistry.meant_by(strategy), AcceleratorRegistry.meant_by(accelerator)
        refuse_what_is_not_called(strategy, accelerator, plugins)
        given["strategy"], settings = meaning_of(strategy)
        if isinstance(accelerator, Accelerator):
            accelerator = given["accelerator"] = accelerator.name
        device = settings.pop("on", accelerator)
        if accelerator not in ("auto", device) and (accelerator, device) != ("gpu", "cuda"):
            raise ConfigurationError(
                f"accelerator={accelerator!r} goes against the device of the strategy, a {device}: say it in one place."
            )
        given["accelerator"] = accelerator = device
        writer = settings.pop("checkpoint_io", None)
        if "accelerator" in settings:
            if accelerator != "auto":
                raise ConfigurationError(
                    f"accelerator={accelerator!r}, and the strategy has one of its own: give it to one of them only."
                )
            accelerator = settings.pop("accelerator")
            given["accelerator"] = accelerator = getattr(accelerator, "name", accelerator)
        given["precision"], checkpoint_io = meant_by(given.pop("plugins"), precision, writer)
        if str(given["precision"]) in ("16", "16-mixed") and (accelerator == "cpu" or not torch.cuda.is_available()):
            warnings.warn("precision=16-mixed needs a GPU: bf16-mixed is used on this CPU.", stacklevel=3)
            given["precision"] = "bf16-mixed"
        logger = as_ours(logger, Logger)
        if isinstance(logger, Iterable) and not isinstance(logger, Logger):
            logger = [as_ours(each, Logger) for each in logger]
        given["logger"] = logger
        if callbacks is False:  # so projects switch them off in configurations
            callbacks = given["callbacks"] = None
        if profiler is False:
            profiler = given["profiler"] = None
        if callbacks is not None:
            several = callbacks if isinstance(callbacks, Sequence) else [callbacks]
            given["callbacks"] = [as_ours(callback, Callback) for callback in several]
        loggers = logger if isinstance(logger, list) else [logger]
        for part in (*given["callbacks"], *loggers, profiler) if callbacks is not None else (*loggers, profiler):
            passed_over.tell(part)
        asked = accelerator
        unlogged = barebones or log_every_n_steps == 0
        if unlogged:
            given["log_every_n_steps"] = None
        super().__init__(**{**given, **settings, **more})
        for plugin in plugins if isinstance(plugins, Sequence) else [plugins]:
            tell = getattr(plugin, "given", None)
            if tell is not None:  # an environment, which is looked at where there are several processes
                tell(alone=self.strategy_name == "single")
        self.strategy.connect = functools.partial(_connect, self)  # type: ignore[method-assign]
        if asked == "cpu" and (gpus := torch.cuda.device_count()):
            rank_zero_warn(
                f"accelerator='cpu', and there {'is a GPU' if gpus == 1 else f'are {gpus} GPUs'} here that nothing"
                " uses: set accelerator='gpu' to train there.",
                category=PossibleUserWarning,
            )
        self.checkpoint_io = checkpoint_io
        if self.strategy_name != "single":  # as in Lightning, whose strategy for one device has none
            self.strategy.cluster_environment = environment_of(plugins)  # type: ignore[attr-defined]
        if unlogged:
            self.log_every_n_steps = 0
        if gradient_clip_algorithm is not None:  # hooks are given it, and print it
            self.gradient_clip_algorithm = GradClipAlgorithmType(gradient_clip_algorithm)
        # Lightning's are 1.0 where nothing is said, and text where it is a path.
        for kind in ("train", "val", "test", "predict"):
            if getattr(self, f"limit_{kind}_batches") is None:
                setattr(self, f"limit_{kind}_batches", 1.0)
        self.default_root_dir = os.fspath(self.default_root_dir)  # type: ignore[assignment]
        # Limits are as they were given until a fit begins.
        self.fast_dev_run = True if fast_dev_run == 1 else fast_dev_run
        if not fast_dev_run:
            self.max_epochs, self.min_epochs = max_epochs, min_epochs  # type: ignore[assignment]

    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """See :meth:`drivetrain.Trainer.fit`. What ``mlflow.pytorch.autolog()`` asked for is written down."""
        autologging.wrap(Trainer, "_logged_fit", _PLAIN_FIT)
        self._logged_fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)

    def _logged_fit(self, *given: Any) -> None:
        """A fit, which MLflow's function may be around."""
        super().fit(*given)

    def _data(self, loaders: Any, datamodule: Any) -> tuple[Any, Any]:
        return super()._data(as_ours(loaders, DataModule), as_ours(datamodule, DataModule))

    def _run(self, request: Request) -> Any:
        request.module = as_ours(uncompiled(request.module), TrainModule)
        if request.stage == "fit":
            self._settle_limits()
        return super()._run(request)

    def take_callback(self, callback: Callback) -> Callback:
        callback = as_ours(callback, Callback)
        if not issubclass(type(callback), Callback) and taken_as_callback(callback):
            return callback
        return super().take_callback(callback)

    def use_callbacks(self, more: list[Callback]) -> None:
        for callback in more:
            passed_over.tell(callback)
        super().use_callbacks([as_ours(callback, Callback) for callback in more])

    def _settle_limits(self) -> None:
        """What is meant where limits of a fit were not given: 1000 epochs, unless steps or time limit it."""
        if self.max_epochs is None:
            timed = self.max_time is not None or any(hasattr(callback, "time_remaining") for callback in self.callbacks)
            self.max_epochs = -1 if self.max_steps != -1 or timed else 1000
            if self.max_epochs == 1000:
                rank_zero_warn(
                    "max_epochs is not given, nor another limit: training ends after 1000 epochs; max_epochs=-1 is for"
                    " no limit.",
                    category=PossibleUserWarning,
                )
        if self.min_epochs is None:
            self.min_epochs = int(self.min_steps is not None)

    @property
    def fit_loop(self) -> Any:
        """The training loop, or what stands for it until a fit has begun."""
        return LoopToCome(self) if self.loop is None else self.loop

    @fit_loop.setter
    def fit_loop(self, loop: Any) -> None:
        if loop is None or (loop is not self.loop and not isinstance(loop, LoopToCome)):
            raise of_ones_own(type(loop).__name__)

    @property
    def validate_loop(self) -> Any:
        """What ``validate`` runs, or what stands for it: whether there is data for it can be asked at any time."""
        return self._loop_of("validate", "val")

    @validate_loop.setter
    def validate_loop(self, loop: Any) -> None:
        raise of_ones_own(type(loop).__name__)

    @property
    def test_loop(self) -> Any:
        """The same of ``test``."""
        return self._loop_of("test", "test")

    @test_loop.setter
    def test_loop(self, loop: Any) -> None:
        raise of_ones_own(type(loop).__name__)

    @property
    def predict_loop(self) -> Any:
        """The same of ``predict``, of which the last one stays."""
        return vars(self).get("predict_loop") or self._no_loop_of("predict", "predict")

    @predict_loop.setter
    def predict_loop(self, loop: PredictLoop | None) -> None:
        if loop is not None and type(loop) is not PredictLoop:
            raise of_ones_own(type(loop).__name__)
        vars(self)["predict_loop"] = loop

    def _loop_of(self, stage: str, data: str) -> Any:
        if self.stage == stage and self.evaluation is not None:
            return self.evaluation
        return self._no_loop_of(stage, data)

    def _no_loop_of(self, stage: str, data: str) -> NoEvaluation:
        return NoEvaluation(self, data, self.progress_of(stage))

    @property
    def log_dir(self) -> str | None:
        """Folder of the first logger, as text: of its run where it is Lightning's for TensorBoard or CSV, else the one
        that it saves below."""
        logger = self.loggers[0] if self.loggers else None
        found = super().log_dir if logger is None or getattr(logger, "versioned", False) is True else logger.save_dir
        return None if found is None else os.fspath(found)

    @property
    def accelerator(self) -> Accelerator:
        return CUDAAccelerator() if self.accelerator_name == "cuda" else CPUAccelerator()

    @property
    def sync_batchnorm(self) -> bool:
        """What the Trainer was made with. As in Lightning, that alone counts: setting it later changes nothing."""
        return self._sync_batchnorm

    @sync_batchnorm.setter
    def sync_batchnorm(self, given: bool) -> None:
        made_with = vars(self).setdefault("_sync_batchnorm", given)
        if bool(given) != bool(made_with) and self.strategy_name != "single":
            rank_zero_warn(
                f"trainer.sync_batchnorm = {given} changes nothing, as in Lightning: give sync_batchnorm={given} to the"
                " Trainer when it is made."
            )

    @property
    def _accelerator_connector(self) -> _AcceleratorConnector:
        return _AcceleratorConnector.of(self)

    @property
    def _checkpoint_connector(self) -> _CheckpointConnector:
        return _CheckpointConnector(self)

    @property
    def _logger_connector(self) -> _LoggerConnector:
        return _LoggerConnector(self)

    @property
    def _results(self) -> _ResultCollection | None:
        """What was logged in the epoch at hand; None where nothing is running, and in a prediction, which logs
        nothing."""
        running = self.status == "running" and not self.predicting
        return _ResultCollection(self, self.metrics) if running and self.metrics is not None else None

    @property
    def _evaluation_loop(self) -> Any:
        """What validates or tests in the stage at hand.

        Raises:
            ConfigurationError: there is none.
        """
        if self.stage == "fit":
            return self.fit_loop.val_loop
        if self.stage not in ("validate", "test") or self.evaluation is None:
            raise ConfigurationError(
                "trainer._evaluation_loop is there while fit, validate or test runs, and after it."
            )
        return self.evaluation

    @property
    def _active_loop(self) -> Any:
        """What is running: a loop of training, of an evaluation or of predictions; None outside of these."""
        if self.training:
            return self.fit_loop
        if self.evaluating:
            return self._evaluation_loop
        return self.predict_loop if self.predicting else None

    def _teardown(self) -> None:
        """Bring the module to the host, as the end of a stage does that leaves its workers; processes, loaders and
        signal handlers of a stage are gone when it returns.

        Raises:
            ConfigurationError: a stage is running, which ends in order by itself.
        """
        if self.status == "running":
            raise ConfigurationError(
                f"trainer._teardown() is called within {self.stage}, which needs what that takes away: set"
                " trainer.should_stop = True, and the stage ends in order."
            )
        module = self.lightning_module
        if module is not None:
            module.cpu()


_PLAIN_FIT = Trainer._logged_fit  # as it is without anything around it

deep_names.name_below(__name__)
