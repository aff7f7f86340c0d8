"""What a Trainer is told: its arguments, what they default to, and the parts made of them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from lightning_utilities.core.overrides import is_overridden

from drivetrain import registry
from drivetrain.arguments import check_arguments, counted, in_seconds, known_arguments
from drivetrain.callback import Callback, state_name
from drivetrain.compilation import check_compile
from drivetrain.compressor import NONE, compression_of
from drivetrain.declaration import Declaration, Plan, refuse
from drivetrain.dependent_arguments import DEPENDENTS
from drivetrain.dependent_options import Part, in_vain, of_options
from drivetrain.errors import ConfigurationError, ConflictError
from drivetrain.launch import Job
from drivetrain.local_path import local_path
from drivetrain.logger import Logger, SilentLogger
from drivetrain.meanings import OWN, Meanings
from drivetrain.parts import callbacks_of, loggers_of, precision_of, profiler_of
from drivetrain.placement import place
from drivetrain.precision import Precision
from drivetrain.strategy import Strategy

_PLAIN = (bool, int, float, str, type(None))


class Configuration:
    """The arguments of a Trainer as its attributes. Their names and meanings are Lightning's."""

    meanings: ClassVar[Meanings] = OWN

    @known_arguments
    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Mapping[str, Any] | Declaration = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        precision: str | int | Precision | None = None,
        compression: str | Mapping[str, Any] | None = None,
        logger: Logger | str | Mapping[str, Any] | list[Any] | bool | None = None,
        callbacks: Callback | str | Mapping[str, Any] | list[Any] | None = None,
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
        """Check the arguments and make the parts.

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
            logger: a logger, a registered name (``"csv"``), ``{"name": ..., ...}`` with its options, a list of these,
                True for TensorBoard, False for none.
            callbacks: a callback, a registered name or ``{"name": ..., ...}`` with its options, or a list of these.
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
            accumulate_grad_batches: micro-batches per optimizer step; a short last window is a step of its own,
                weighted by its samples.
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
            return_weights: whether a call that starts workers brings the weights that it trained, or took from a
                checkpoint, back into the caller's module.
            backend: ``"gloo"`` or ``"nccl"``; by the accelerator otherwise.
            node_rank, master_addr, master_port, start_timeout: several nodes without torchrun.
            timeout: seconds that a collective may take.

        Raises:
            ConfigurationError: an argument or a combination that cannot run.
        """
        batch, nonfinite = batch or self.meanings.batch, nonfinite or self.meanings.nonfinite
        given = dict(locals())
        self.arguments = {name: value for name, value in given.items() if isinstance(value, _PLAIN)}
        check_arguments(given)
        check_compile(compile)
        if barebones:
            profiler = None
            logger = enable_checkpointing = enable_progress_bar = enable_model_summary = False
            num_sanity_val_steps = 0
        limit_train_batches, limit_val_batches = counted(limit_train_batches), counted(limit_val_batches)
        limit_test_batches, limit_predict_batches = counted(limit_test_batches), counted(limit_predict_batches)
        overfit_batches, val_check_interval = counted(overfit_batches), counted(val_check_interval)
        fast = int(fast_dev_run)
        if fast:
            max_epochs, max_steps, num_sanity_val_steps, val_check_interval = 1, fast, 0, 1.0
            limit_train_batches = limit_val_batches = limit_test_batches = limit_predict_batches = fast
            check_val_every_n_epoch = 1
            if self.meanings.checkpoint == "file":  # projects go on to use both: they are there, and write nothing
                logger = SilentLogger() if logger is None or logger else False
            else:
                logger = enable_checkpointing = False
        if overfit_batches:
            limit_train_batches = limit_val_batches = overfit_batches
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
        if isinstance(val_check_interval, (str, timedelta, Mapping)):
            self.val_check_seconds, val_check_interval = in_seconds("val_check_interval", val_check_interval), None
        self.val_check_interval = 1.0 if val_check_interval is None else val_check_interval
        self.check_val_every_n_epoch = check_val_every_n_epoch
        checks = 2 if num_sanity_val_steps is None else num_sanity_val_steps
        self.num_sanity_val_steps: int | float = float("inf") if checks == -1 else checks
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
        self.default_root_dir = Path(local_path(default_root_dir or Path.cwd(), "default_root_dir"))
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
        placed = place(accelerator, strategy, devices, num_nodes, backend, self.meanings.cpu_workers, timeout)
        self.job: Job | None = placed.job
        self.accelerator_name, self.backend = placed.accelerator, placed.backend
        self.num_devices, self.num_nodes, self.world_size = placed.devices, placed.num_nodes, placed.world_size
        self.gpus = placed.gpus
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
        self.strategy.planned_device = placed.device
        self._own_callbacks = callbacks_of(self, callbacks, enable_checkpointing, enable_model_summary)
        self.callbacks: list[Callback] = []
        self._used: tuple[list[Callback], list[Callback]] = ([], [])
        self.use_callbacks([])
        self.loggers = loggers_of(self, logger)
        self._fresh_state()

    def _fresh_state(self) -> None:
        """Where a run stands before there was one: for what derives from this."""

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
            arguments=self.arguments,
        )

    def in_vain(self, plan: Plan) -> list[str]:
        """A sentence for each argument that was given and has no effect in a run of ``plan``."""
        parameters = inspect.signature(Configuration.__init__).parameters
        defaults = {name: one.default for name, one in parameters.items()} | {"compression": NONE}
        compressor = registry.load("compressors", self.compression_name)
        return in_vain(
            plan,
            [
                of_options("strategy", self.strategy_options, self.declaration.dependents),
                of_options("compression", self.compression_options, compressor.dependents),
                Part(DEPENDENTS, {**self.arguments, "compression": self.compression_name}, defaults),
            ],
        )

    def take_callback(self, callback: Callback) -> Callback:
        """``callback``, as it is told of a run."""
        if not isinstance(callback, Callback):
            raise ConfigurationError(f"callbacks: {type(callback).__name__} is no Callback, derive it from one.")
        return callback

    def _own_callbacks_now(self) -> list[Callback]:
        """The trainer's own callbacks, with what a user has added to the list ``callbacks`` or taken from it since it
        was made."""
        made, of_module = self._used
        if len(made) == len(self.callbacks) and all(map(operator.is_, made, self.callbacks)):
            return self._own_callbacks
        shown, others = {id(callback) for callback in made}, {id(callback) for callback in of_module}
        # What the module's replaced is in neither.
        aside = [callback for callback in self._own_callbacks if id(callback) not in shown]
        return aside + [self.take_callback(callback) for callback in self.callbacks if id(callback) not in others]

    def use_callbacks(self, more: list[Callback]) -> None:
        """The trainer's callbacks and the module's, which replace others of their type or of one that theirs derives
        from; checkpointing ones last."""
        self._own_callbacks = self._own_callbacks_now()
        kinds = {kind for callback in more for kind in type(callback).__mro__} - {*Callback.__mro__}
        kept = [callback for callback in self._own_callbacks if type(callback) not in kinds]
        self.callbacks = sorted([*kept, *more], key=lambda callback: callback.saves_checkpoints)
        self._used = (list(self.callbacks), list(more))
        keys = [state_name(c) for c in self.callbacks if is_overridden("state_dict", c, Callback)]
        for key in keys:
            if keys.count(key) > 1:
                raise ConflictError(f"two callbacks have the state key {key!r}: give them different arguments.")
