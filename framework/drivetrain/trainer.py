"""Trainer: the object a user holds. It keeps the configuration and the user-facing state and wires the parts."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
import torch._dynamo  # every optimizer imports it at its first use; before a fork it is paid for once
from lightning_utilities.core.overrides import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.distributed.tensor import DTensor

from drivetrain import handover, session, snapshot
from drivetrain.arguments import check_arguments, in_seconds
from drivetrain.callback import Callback
from drivetrain.checkpoint import rng
from drivetrain.comm import phase
from drivetrain.compilation import check_compile
from drivetrain.compressor import compression_of
from drivetrain.declaration import Declaration, Plan, refuse
from drivetrain.empty_init import EmptyInit
from drivetrain.errors import ConfigurationError, Interrupted, by_keyboard
from drivetrain.launch import Job
from drivetrain.logger import Logger, SilentLogger
from drivetrain.meanings import OWN, Meanings
from drivetrain.metrics import Metrics
from drivetrain.module import TrainModule
from drivetrain.parts import callbacks_of, loggers_of, precision_of, profiler_of
from drivetrain.placement import place
from drivetrain.precision import Precision
from drivetrain.published import PublishedMetrics
from drivetrain.session import Request
from drivetrain.strategy import Strategy
from drivetrain.summary import run_summary
from drivetrain.timing import Timing
from drivetrain.trainer_state import TrainerState
from drivetrain.transfer import BatchTransfer

if TYPE_CHECKING:
    from drivetrain.data import DataModule
    from drivetrain.hooks import Hooks
    from drivetrain.loops.evaluate import EvaluateLoop, PredictLoop
    from drivetrain.loops.fit import FitLoop
    from drivetrain.optimizer import SchedulerConfig
    from drivetrain.profiling import Instruments
    from drivetrain.sharding import BatchSource


class Trainer(TrainerState):
    """Trains, evaluates and predicts with any strategy. Arguments carry Lightning's names and meanings.

    Args:
        accelerator: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        strategy: a registered name (``"ring"``), a dict of ``name`` and options, or a
            :class:`~drivetrain.declaration.Declaration`.
        devices: workers per node: a number, ``"auto"`` (all GPUs; on CPUs 1 for ``single``, else 2), -1 for all.
        num_nodes: nodes of the job.
        precision: ``"32-true"``, ``"64-true"``, ``"bf16-true"``, ``"bf16-mixed"``, ``"16-mixed"`` or a
            :class:`~drivetrain.precision.Precision`.
        compression: how gradients are made smaller before they travel: a registered name (``"topk"``), or a dict of
            ``name`` and options (``{"name": "topk", "ratio": 0.01}``).
        logger: a logger, a list, True for TensorBoard, False for none.
        callbacks: a callback or a list.
        fast_dev_run: run this many batches of everything (True: 1), without logs and checkpoints.
        max_epochs: stop after so many epochs; default 1000 unless ``max_steps`` is given; -1 for no limit.
        max_steps: stop after so many optimizer steps; -1 for no limit.
        max_time: stop after this time: ``"DD:HH:MM:SS"``, timedelta or its keywords as a dict.
        limit_train_batches: number of batches or fraction of an epoch; likewise the others.
        overfit_batches: train and validate on this number or fraction of the batches, unshuffled.
        val_check_interval: batches between validations, or a fraction of an epoch, or a time: ``"DD:HH:MM:SS"``,
            timedelta or its keywords as a dict.
        check_val_every_n_epoch: validate in every n-th epoch; None counts ``val_check_interval`` over epochs.
        num_sanity_val_steps: validation batches before training.
        log_every_n_steps: optimizer steps between writes of metrics; the ranks agree at these boundaries.
        accumulate_grad_batches: micro-batches per optimizer step; a short last window is a step of its own, weighted
            by its samples.
        gradient_clip_val: bound of the gradients' norm or entries, see ``gradient_clip_algorithm``.
        profiler: what measures the parts of a run: ``"simple"``, ``"advanced"``, ``"pytorch"`` or an object.
        sync_batchnorm: let BatchNorm see the batch of all replicas (GPUs only).
        reload_dataloaders_every_n_epochs: ask for the loaders again so often.
        enable_autolog_hparams: whether hyper-parameters are written to the loggers at the start.
        batch: ``"global"``: a loader's batch is the whole step's, each replica reads its part. ``"per_process"``:
            each replica gets batches of that size.
        seed: seeds everything before the module is built by a recipe, and the shuffle; None keeps torch's seed.
        nonfinite: a loss that is not finite: ``"raise"``, ``"skip"`` the step, or ``"warn"``.
        compile: compile the module's networks with ``torch.compile``: True (inductor) or the name of a backend.
        return_weights: whether a call that starts workers brings the trained weights back into the caller's module.
        backend: ``"gloo"`` or ``"nccl"``; by the accelerator otherwise.
        node_rank, master_addr, master_port, start_timeout: several nodes without torchrun.
        timeout: seconds that a collective may take.

    Raises:
        ConfigurationError: an argument or a combination that cannot run.
    """

    meanings: ClassVar[Meanings] = OWN

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Mapping[str, Any] | Declaration = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        precision: str | int | Precision | None = None,
        compression: str | Mapping[str, Any] | None = None,
        logger: Logger | list[Logger] | bool | None = None,
        callbacks: Callback | list[Callback] | None = None,
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
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        detect_anomaly: bool = False,
        barebones: bool = False,
        default_root_dir: str | Path | None = None,
        profiler: Any = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        enable_autolog_hparams: bool = True,
        batch: str | None = None,
        seed: int | None = None,
        nonfinite: str | None = None,
        compile: bool | str = False,
        loss_scale: float | str | None = None,
        return_weights: bool = True,
        backend: str | None = None,
        node_rank: int = 0,
        master_addr: str = "127.0.0.1",
        master_port: int = 0,
        start_timeout: float = 60.0,
        timeout: float = 300.0,
    ) -> None:
        batch, nonfinite = batch or self.meanings.batch, nonfinite or self.meanings.nonfinite
        given = dict(locals())
        check_arguments(given)
        check_compile(compile)
        if barebones:
            profiler = None
            logger = enable_checkpointing = enable_progress_bar = enable_model_summary = False
            num_sanity_val_steps = 0
        fast = int(fast_dev_run)
        if fast:
            max_epochs, max_steps, num_sanity_val_steps, val_check_interval = 1, fast, 0, 1.0
            limit_train_batches = limit_val_batches = limit_test_batches = limit_predict_batches = fast
            check_val_every_n_epoch = 1
            if self.meanings.checkpoint == "file":  # projects go on to use both: they are there, and write nothing
                logger = SilentLogger() if logger is None or logger else False
            else:
                logger = enable_checkpointing = False
        self.fast_dev_run = fast
        self.barebones = barebones
        self.max_steps = max_steps
        self.min_steps = min_steps
        self.min_epochs = 1 if min_epochs is None and min_steps is not None else min_epochs
        self.max_epochs = max_epochs if max_epochs is not None else (-1 if max_steps != -1 or max_time else 1000)
        self.max_time = max_time
        self.limit_train_batches, self.limit_val_batches = limit_train_batches, limit_val_batches
        self.limit_test_batches, self.limit_predict_batches = limit_test_batches, limit_predict_batches
        self.overfit_batches = overfit_batches
        self.val_check_seconds: float | None = None
        if isinstance(val_check_interval, (str, timedelta, dict)):
            self.val_check_seconds, val_check_interval = in_seconds("val_check_interval", val_check_interval), None
        self.val_check_interval = 1.0 if val_check_interval is None else val_check_interval
        self.check_val_every_n_epoch = check_val_every_n_epoch
        self.num_sanity_val_steps = 2 if num_sanity_val_steps is None else num_sanity_val_steps
        self.log_every_n_steps = 50 if log_every_n_steps is None else log_every_n_steps
        self.enable_progress_bar = enable_progress_bar is not False
        self.accumulate_grad_batches = accumulate_grad_batches
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm
        self.deterministic = deterministic
        self.benchmark = benchmark
        self.inference_mode = inference_mode
        self.use_distributed_sampler = use_distributed_sampler
        self.detect_anomaly = detect_anomaly
        self.default_root_dir = Path(default_root_dir or Path.cwd())
        self.batch = batch
        self.seed = seed
        self.nonfinite = nonfinite
        self.compile = compile
        self.return_weights = return_weights
        self.node_rank = node_rank
        self.master_addr = master_addr
        self.master_port = master_port
        self.start_timeout = start_timeout
        self.timeout = timeout
        self.sync_batchnorm = sync_batchnorm
        self.reload_dataloaders_every_n_epochs = reload_dataloaders_every_n_epochs
        self.enable_autolog_hparams = enable_autolog_hparams
        self.profiler = profiler_of(profiler)
        placed = place(accelerator, strategy, devices, num_nodes, backend, self.meanings.cpu_workers)
        self.job = placed.job
        self.accelerator_name, self.backend = placed.accelerator, placed.backend
        self.num_devices, self.num_nodes, self.world_size = placed.devices, placed.num_nodes, placed.world_size
        self.declaration, self.strategy_options = placed.declaration, placed.options
        self.strategy_name = placed.declaration.name
        self.precision_plugin = precision_of(precision, loss_scale)
        compressor, self.compression_options = compression_of(compression)
        self.compression_name = compressor.name
        refuse(self.plan(), self.declaration)
        self.strategy: Strategy = self.declaration.build(self.strategy_options)
        self.strategy.name = self.declaration.name
        self.strategy.precision = self.precision_plugin
        self.strategy.compressor = compressor.build(self.compression_options)
        self._own_callbacks = callbacks_of(self, callbacks, enable_checkpointing, enable_model_summary)
        self.callbacks: list[Callback] = []
        self.use_callbacks([])
        self.loggers = loggers_of(self, logger)
        self._fresh_state()

    def plan(
        self,
        stages: tuple[str, ...] = (),
        automatic: bool | None = None,
        optimizers: int | None = None,
        closures: bool | None = None,
    ) -> Plan:
        """What is asked of the strategy, for :func:`drivetrain.declaration.refuse`."""
        return Plan(
            strategy=self.strategy_name,
            options=self.strategy_options,
            world_size=self.world_size,
            num_nodes=self.num_nodes,
            accelerator=self.accelerator_name,
            backend=self.backend,
            precision=self.precision_plugin.name,
            accumulation=self.accumulate_grad_batches,
            clip_value=self.gradient_clip_val or None,
            clip_algorithm=self.gradient_clip_algorithm or "norm",
            compile=bool(self.compile),
            batch=self.batch,
            val_check_interval=self.val_check_interval,
            check_val_every_n_epoch=self.check_val_every_n_epoch,
            automatic_optimization=automatic,
            optimizers=optimizers,
            closures=closures,
            stages=stages,
            compression=self.compression_name,
            compression_options=self.compression_options,
        )

    def _fresh_state(self) -> None:
        self.status = "idle"
        self.stage: str | None = None
        self.training = self.evaluating = self.predicting = self.sanity_checking = False
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
        self._given: dict[str, Any] = {}  # evaluation loaders as they were given
        self.validation: EvaluateLoop | None = None
        self.evaluation: EvaluateLoop | None = None
        self.val_check_batch: int | float = float("inf")
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self.timing = Timing()
        self.loss_curve: list[tuple[int, float]] = []
        self.published = PublishedMetrics(self)
        self.random_state: dict[str, Any] | None = None
        self.data_seed = 0
        self.ckpt_path: str | None = None
        self._adopted: dict[str, int] = {}  # the counters of earlier calls of fit
        self._modes: dict[str, bool] = {}
        self._consensus = 0
        self.to_device: BatchTransfer = None  # type: ignore[assignment]

    # -- what a user calls --------------------------------------------------------------------------------------
    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train. Starts workers where the strategy needs them and none are there; afterwards the caller's module holds
        the trained weights, and this object the counters and metrics. Called again it counts on from there, with new
        optimizers, up to ``max_epochs`` and ``max_steps``, which may have been raised meanwhile.

        Args:
            train_dataloaders: a loader, or a data module in its place.
            ckpt_path: go on from ``"last"``, ``"best"``, ``"auto"`` (the newest, or from the start) or a path, of a
                checkpoint that drivetrain wrote or of a file that Lightning wrote.
            weights_only: False: trust a checkpoint file that holds objects of arbitrary classes.
        """
        train, datamodule = _data(train_dataloaders, datamodule)
        loaders = {"train": train, "val": val_dataloaders}
        self._run(Request("fit", model, loaders, datamodule, ckpt_path, weights_only=weights_only))

    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Validate; one dict of metrics per loader."""
        return self._evaluate("validate", "val", model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Test; one dict of metrics per loader. Without ``model`` the best checkpoint of the last fit is tested."""
        return self._evaluate("test", "test", model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def predict(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """Predict; the predictions in the order of the data (batch by batch, each in parts where ranks shared it),
        a list of lists where there are several loaders. Each sample is predicted once."""
        loader, datamodule = _data(dataloaders, datamodule)
        model, ckpt_path = self._known(model, ckpt_path)
        request = Request("predict", model, {"predict": loader}, datamodule or self.datamodule, ckpt_path)
        request.weights_only, request.keep_predictions = weights_only, return_predictions is not False
        parts = self._run(request)
        if return_predictions is False or parts is None:
            return None
        merged = [[item for _, _, item in sorted(loader, key=lambda part: part[:2])] for loader in parts]
        return merged[0] if len(merged) == 1 else merged

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Save the run as a checkpoint directory at ``filepath``; every worker must call it."""
        if self.lightning_module is None:
            raise ConfigurationError("save_checkpoint needs a module: call fit first.")
        if storage_options is not None:
            raise ConfigurationError("save_checkpoint(storage_options=...): checkpoints are local files: leave it out.")
        clock = perf_counter()
        with phase.during(phase.CHECKPOINT):
            snapshot.write(self, filepath, bool(weights_only))
        self.timing.add("checkpoint", clock)

    def save_alone(self, filepath: str | Path) -> None:
        """Save what this rank has at ``filepath`` without the other ranks: what a callback may do in ``on_exception``.

        Raises:
            CheckpointError: the strategy leaves no rank the whole state, or the disk refuses.
        """
        snapshot.write_alone(self, filepath)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first worker only, above the progress bar."""
        if self.is_global_zero:
            bar = self.progress_bar_callback
            show = print if bar is None else bar.print
            show(*args, **kwargs)

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """While it lasts modules are made in the precision's dtype and, with one process or one GPU for each, on the
        device that they are trained on. ``empty_init`` leaves weights as memory was, to be loaded from a checkpoint."""
        device = torch.device(self.accelerator_name if self.job is None else self.strategy.device)
        with self.precision_plugin.init_context(), device if self.world_size == 1 else nullcontext():
            with EmptyInit() if empty_init else nullcontext():
                yield

    def request_stop(self, reason: str | None = None) -> None:
        """Ask for a stop from one rank; all stop together at the next boundary, a lone rank after its batch."""
        self.stop_wish = reason or self.stop_wish
        if reason != "max_time" or self.world_size == 1:
            self.should_stop = True

    def close(self) -> None:
        """Leave the job: process groups and threads end. Called for you where workers were started for you."""
        self.disconnect(None)

    # -- running ------------------------------------------------------------------------------------------------
    def _evaluate(
        self,
        stage: str,
        which: str,
        model: Any,
        loaders: Any,
        ckpt_path: Any,
        verbose: bool,
        datamodule: Any,
        weights_only: bool | None,
    ) -> list[dict[str, float]]:
        loader, datamodule = _data(loaders, datamodule)
        model, ckpt_path = self._known(model, ckpt_path)
        data = datamodule or self.datamodule
        return self._run(Request(stage, model, {which: loader}, data, ckpt_path, verbose, weights_only))

    def _known(self, model: TrainModule | None, ckpt_path: Any) -> tuple[TrainModule, Any]:
        if model is not None:
            return model, ckpt_path
        if self.lightning_module is None:
            raise ConfigurationError("there is no module: pass one, or call fit before.")
        if ckpt_path is None and getattr(self.checkpoint_callback, "best_model_path", None):
            ckpt_path = "best"
        return self.lightning_module, ckpt_path

    def _run(self, request: Request) -> Any:
        try:
            return self._run_stage(request)
        except (Interrupted, KeyboardInterrupt) as stop:
            if self.meanings.keyboard == "raise" or not by_keyboard(stop):
                raise
            self.status = "interrupted"
            raise SystemExit(1) from stop

    def _run_stage(self, request: Request) -> Any:
        session.check(self, request)
        if request.stage == "fit":
            self.should_stop, self.stop_wish = False, None
            self.timing = Timing()
            fit = self.loop
            if fit is not None:
                self._adopted = fit.counters()
        if self.job is None and self.world_size > 1:
            return handover.in_workers(self, request)
        alone = Job(accelerator=self.accelerator_name, backend=self.backend, timeout=self.timeout)
        result = session.run(self, request, self.job or alone)
        if request.stage == "predict":
            return handover.gather_predictions(self.strategy.communicator, result)
        return result

    def connect(self, job: Job) -> None:
        """Join ``job``; does nothing when that is done."""
        if self._connected:
            return
        if Trainer._in_job is not None and job.origin != "inline":  # an earlier one of the script makes room
            Trainer._in_job.close()
        self.job = job if job.origin != "inline" else None
        if self.job is not None:
            self.node_rank = job.node_rank
        self.strategy.connect(job)
        setattr(rank_zero_only, "rank", job.rank)  # noqa: B010  (mypy does not know of it)
        self._connected = True
        if self.job is not None:
            Trainer._in_job = self
            atexit.register(self.close)  # a script under torchrun need not say goodbye itself
        # One seed for all ranks' data order, whatever each rank's own generator was seeded with.
        mine = self.seed if self.seed is not None else torch.initial_seed() % 2**53
        self.data_seed = int(self.strategy.communicator.all_gather_plain(mine)[0])

    _connected = False
    _in_job: ClassVar[Trainer | None] = None  # the one of this process that holds its process group

    def disconnect(self, error: BaseException | None) -> None:
        if self._connected:
            self._connected = False
            if Trainer._in_job is self:
                Trainer._in_job = None
            atexit.unregister(self.close)
            self.strategy.close(error)

    def use_callbacks(self, more: list[Callback]) -> None:
        """The trainer's callbacks and the module's, which replace others of their type; checkpointing ones last."""
        kinds = {type(callback) for callback in more}
        kept = [callback for callback in self._own_callbacks if type(callback) not in kinds]
        found = [c for c in [*kept, *more] if not (c.rank_zero_only and self.job is not None and self.job.rank > 0)]
        self.callbacks = sorted(found, key=lambda callback: callback.saves_checkpoints)
        keys = [c.state_key for c in self.callbacks if is_overridden("state_dict", c, Callback)]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigurationError(f"two callbacks have the state key {key!r}: give them different arguments.")

    def new_metrics(self) -> Metrics:
        strategy = self.strategy
        device = (
            strategy.device if strategy.job.backend == "nccl" and strategy.job.world_size > 1 else torch.device("cpu")
        )
        communicator, module = strategy.communicator, self.lightning_module
        current = lambda: self.hooks.current
        return Metrics(
            strategy.gather,
            communicator,
            device,
            current,
            module.named_modules,
            strategy.counts,
            self.meanings.log_over_ranks,
        )

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """The strategy's consensus; within another it is there already."""
        self._consensus += 1
        try:
            if self._consensus > 1:
                yield
            else:
                with self.strategy.consensus():
                    yield
        finally:
            self._consensus -= 1

    def full_weights(self) -> dict[str, torch.Tensor]:
        """The model's whole weights by name, as they are validated and saved, however the strategy holds them. Every
        training rank calls it at the same point; complete on the first rank."""
        with torch.inference_mode(False), torch.no_grad(), self.consensus():
            held = self.strategy.state_dict([])["module"]
            return {name: _whole(tensor.detach()) for name, tensor in held.items()}

    def remember_modes(self) -> None:
        self._modes = {name: child.training for name, child in self.lightning_module.named_modules()}

    def restore_modes(self) -> None:
        """Every sub-module back in the mode (train or eval) it had before the evaluation."""
        for name, child in self.lightning_module.named_modules():
            child.training = self._modes.get(name, child.training)

    def restore_random_state(self) -> None:
        """Set the random generators of a resumed run, once."""
        state, self.random_state = self.random_state, None
        if state is not None:
            rng.restore(state)

    @contextmanager
    def random_state_kept(self) -> Iterator[None]:
        state = rng.capture()
        yield
        rng.restore(state)

    def interrupt(self, signum: int) -> NoReturn:
        """Save where training stands, between two steps and on all ranks, and leave."""
        saver = next((c for c in self.callbacks if c.saves_checkpoints and hasattr(c, "save_now")), None)
        if saver is not None and self.global_step > 0:
            saver.save_now(self)
        raise Interrupted(signum)

    def run_summary(self) -> dict[str, Any]:
        """What the run record holds of this run, as plain data."""
        return run_summary(self)

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are not forked: the configuration travels, a run of this process does not."""
        fresh = dict(self.__dict__)
        for name in ("hooks", "metrics", "loop", "predict_loop", "train_source", "validation", "evaluation"):
            fresh[name] = None
        fresh["request"] = fresh["to_device"] = None
        fresh["lr_scheduler_configs"], fresh["_given"] = [], {}
        fresh["predict_sources"], fresh["test_sources"] = [], []
        return fresh


def _data(loaders: Any, datamodule: Any) -> tuple[Any, Any]:
    """Loaders and data module; a data module may stand in the loaders' place."""
    from drivetrain.data import DataModule

    if isinstance(loaders, DataModule):
        return None, loaders
    return loaders, datamodule


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor``, put together where ranks hold parts of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
