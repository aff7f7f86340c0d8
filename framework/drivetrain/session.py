"""One stage (fit, validate, test, predict) in this process: what is built in which order around the loops."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.overrides import is_overridden
from torch.optim import Optimizer

from drivetrain import snapshot
from drivetrain.comm import phase
from drivetrain.compilation import compiled
from drivetrain.data_hooks import DataHooks
from drivetrain.declaration import refuse
from drivetrain.errors import ConfigurationError, Interrupted
from drivetrain.hooks import Hooks
from drivetrain.launch import Job, signals
from drivetrain.loops.evaluate import Abandoned, EvaluateLoop, PredictLoop, empty
from drivetrain.loops.fit import FitLoop
from drivetrain.module import TrainModule
from drivetrain.optimizer import needs_closure, parse_configuration
from drivetrain.sharding import BatchSource, as_sources
from drivetrain.transfer import BatchTransfer

if TYPE_CHECKING:
    from drivetrain.data import DataModule
    from drivetrain.trainer import Trainer


@dataclass
class Request:
    """What the user asked of the Trainer.

    Attributes:
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        module: the model.
        loaders: by ``"train"``, ``"val"``, ``"test"``, ``"predict"``; given to the call instead of by hooks.
        datamodule: where loaders come from otherwise.
        ckpt_path: ``None``, ``"best"``, ``"last"``, ``"auto"`` or a path.
        verbose: show the table of metrics after an evaluation.
    """

    stage: str
    module: TrainModule
    loaders: dict[str, Any] = field(default_factory=dict)
    datamodule: DataModule | None = None
    ckpt_path: Any = None
    verbose: bool = True


_STEP_OF = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}
_LOADER_OF = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


def check(trainer: Trainer, request: Request) -> None:
    """Refuse what cannot run, before anything starts."""
    module, stage = request.module, request.stage
    if not isinstance(module, TrainModule):
        raise ConfigurationError(
            f"trainer.{stage} needs a TrainModule, not a {type(module).__name__}: derive the model from"
            " drivetrain.TrainModule."
        )
    name = type(module).__name__
    if stage in _STEP_OF and not is_overridden(_STEP_OF[stage], module, TrainModule):
        raise ConfigurationError(f"{name} has no {_STEP_OF[stage]}: define it to {stage}.")
    if stage == "fit" and not is_overridden("configure_optimizers", module, TrainModule):
        raise ConfigurationError(f"{name} has no configure_optimizers: define it and return an optimizer.")
    if request.datamodule is not None and not isinstance(request.datamodule, DataHooks):
        raise ConfigurationError(
            f"datamodule is a {type(request.datamodule).__name__}, not a DataModule: pass loaders as"
            " train_dataloaders, val_dataloaders or dataloaders."
        )
    if _loader(request, _LOADER_OF[stage]) is None:
        which = _LOADER_OF[stage]
        raise ConfigurationError(
            f"there is no data to {stage} with: pass a loader or a datamodule, or define {which}_dataloader in {name}."
        )
    plan = trainer.plan(stages=(stage,), automatic=module.automatic_optimization)
    refuse(plan, trainer.declaration)
    trainer.strategy.check_module(module, plan)
    if stage == "fit" and request.loaders.get("train") is not None:
        trainer.strategy.check_data(request.loaders["train"])


def _loader(request: Request, which: str) -> Any:
    """The loader or the hook that makes it, or None."""
    given = request.loaders.get(which)
    if given is not None:
        return given
    for owner in (request.datamodule, request.module):
        if owner is not None:
            name = f"{which}_dataloader"
            if name in vars(owner) or getattr(type(owner), name) is not getattr(DataHooks, name):
                return getattr(owner, name)
    return None


def run(trainer: Trainer, request: Request, job: Job) -> Any:
    """Run ``request`` as worker ``job``. Returns the evaluation's results, the predictions, or None."""
    signals.clear()
    phase.current.name = phase.SETUP
    with signals.handling(), _deterministic(trainer):
        try:
            trainer.connect(job)
            _attach(trainer, request)
            return _stage(trainer, request)
        except BaseException as error:
            _fail(trainer, request, error)
            raise
        finally:
            trainer.training = trainer.evaluating = trainer.sanity_checking = False


def _fail(trainer: Trainer, request: Request, error: BaseException) -> None:
    """Tell those who must know; then leave without a word to the other ranks, who may be gone."""
    status = "interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed"
    trainer.status = status
    try:
        if trainer.hooks is not None:
            trainer.hooks.of_callbacks("on_exception", error)
        if request.datamodule is not None:
            request.datamodule.on_exception(error)
        for logger in trainer.loggers if trainer.is_global_zero else []:
            logger.finalize(status)
    finally:
        trainer.disconnect(error)


def _attach(trainer: Trainer, request: Request) -> None:
    """Bring module, data, callbacks and trainer together."""
    module = request.module
    trainer.lightning_module = module
    trainer.datamodule = request.datamodule
    module.trainer = trainer
    if request.datamodule is not None:
        request.datamodule.trainer = trainer
    trainer.stage = request.stage
    trainer.request = request
    extra = module.configure_callbacks()
    trainer.use_callbacks(extra if isinstance(extra, (list, tuple)) else [extra])
    trainer.hooks = Hooks(trainer, module, trainer.callbacks)
    trainer.metrics = trainer.new_metrics()
    trainer.status = "running"


def _stage(trainer: Trainer, request: Request) -> Any:
    module, stage, hooks, strategy = request.module, request.stage, trainer.hooks, trainer.strategy
    _prepare_data(trainer, request)
    if request.datamodule is not None:
        request.datamodule.setup(stage)
    hooks.of_callbacks("setup", stage)
    module.setup(stage)
    with strategy.init_context():
        module.configure_model()
    with compiled(module, trainer.compile):
        strategy.prepare(module, stage)
        trainer.to_device = BatchTransfer(trainer)
        _log_hyperparameters(trainer)
        result = None
        if stage == "fit":
            _fit(trainer, request)
        else:
            result = _evaluate(trainer, request)
    if strategy.trains:
        strategy.finish()
    if request.datamodule is not None:
        request.datamodule.teardown(stage)
    hooks.of_callbacks("teardown", stage)
    module.teardown(stage)
    trainer.status = "stopped" if trainer.should_stop and stage == "fit" else "completed"
    for logger in trainer.loggers if trainer.is_global_zero else []:
        logger.finalize(trainer.status)
    return result


def _prepare_data(trainer: Trainer, request: Request) -> None:
    """``prepare_data`` on the first process of each node, while the others wait; nobody waits where there is none."""
    owners = [o for o in (request.datamodule, request.module) if o is not None]
    owners = [o for o in owners if type(o).prepare_data is not DataHooks.prepare_data]
    if not owners:
        return
    if trainer.local_rank == 0:
        for owner in owners:
            owner.prepare_data()
    trainer.strategy.communicator.barrier()


def _log_hyperparameters(trainer: Trainer) -> None:
    if not trainer.is_global_zero:
        return
    params: dict[str, Any] = {}
    for owner in (trainer.lightning_module, trainer.datamodule):
        if owner is not None and owner._log_hyperparams:
            params |= owner.hparams_initial
    for logger in trainer.loggers:
        logger.log_hyperparams(params)


def sources(trainer: Trainer, request: Request, which: str) -> list[BatchSource]:
    """The loaders of ``which`` (``"train"``, ``"val"``, ``"test"``, ``"predict"``) as this rank reads them."""
    made = _loader(request, which)
    loaders = made() if callable(made) and not hasattr(made, "__iter__") else made
    limit = trainer.limits[which]
    seed = trainer.data_seed
    found = as_sources(
        loaders,
        shard=trainer.strategy.data,
        mode=trainer.batch,
        seed=seed,
        training=which == "train",
        limit=limit,
        reshard=trainer.use_distributed_sampler,
        in_order=bool(trainer.overfit_batches) and which in ("train", "val"),
    )
    if trainer.strategy.trains and (which == "train" or trainer.strategy.data.lockstep):
        gather = trainer.strategy.communicator.all_gather_plain
        for source in found:
            source.agree_on_length(gather([source.full_length, source.length]))
    for source in found:
        if source.full_length == 0:
            if which == "train":
                raise ConfigurationError("the train data is empty: its loader gives no batch.")
            if trainer.is_global_zero:
                warnings.warn(empty(which, source, len(found)), stacklevel=2)
    return found


# -- fit --------------------------------------------------------------------------------------------------------
def _fit(trainer: Trainer, request: Request) -> None:
    module, strategy, hooks = request.module, trainer.strategy, trainer.hooks
    training = sources(trainer, request, "train")
    if len(training) != 1:
        raise ConfigurationError(
            f"train_dataloader gives {len(training)} loaders: give one (a ConcatDataset joins several data sets)."
        )
    strategy.check_data(training[0].loader)
    trainer.train_source = training[0]
    validates = is_overridden("validation_step", module, TrainModule) and _loader(request, "val") is not None
    validation = sources(trainer, request, "val") if validates and trainer.limits["val"] != 0 else []
    trainer.validation = EvaluateLoop(trainer, "validation", validation) if any(s.length for s in validation) else None
    trainer.val_check_batch = _validation_interval(trainer)
    fit = trainer.fit_loop = FitLoop(trainer, training[0], **trainer._adopted)
    trainer.lr_scheduler_configs = []
    fit.use(strategy.build_optimizers(lambda: _configure(trainer)))
    trainer.fitted = True
    path = snapshot.find(trainer, request.ckpt_path)
    resumed = path is not None
    trainer.ckpt_path = None if path is None else str(path)
    if path is not None:
        snapshot.restore(trainer, snapshot.read(trainer, path))
    elif fit.finished and trainer.is_global_zero:
        warnings.warn(
            f"this Trainer has trained {fit.epoch} epochs and {fit.global_step} steps and is at its limit"
            f" (max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}): fit does nothing; raise the limit or"
            " make a new Trainer.",
            stacklevel=2,
        )
    if not strategy.trains:
        strategy.serve()
        return
    hooks("on_fit_start")
    torch.set_grad_enabled(True)
    _part_random_streams(trainer)
    if not resumed:
        _sanity_check(trainer)
    trainer.training = True
    fit.run()
    trainer.training = False
    hooks("on_fit_end")


def _configure(trainer: Trainer) -> list[Optimizer]:
    """The module's optimizers; its schedulers go to the trainer. Refuses what the strategy does not do."""
    module = trainer.lightning_module
    optimizers, trainer.lr_scheduler_configs = parse_configuration(module.configure_optimizers())
    if module.automatic_optimization and len(optimizers) > 1:
        raise ConfigurationError(
            f"{type(module).__name__} configures {len(optimizers)} optimizers: set automatic_optimization = False and"
            " step them in training_step, or configure one."
        )
    plan = trainer.plan(
        stages=("fit",),
        automatic=module.automatic_optimization,
        optimizers=len(optimizers),
        closures=any(needs_closure(optimizer) for optimizer in optimizers),
    )
    refuse(plan, trainer.declaration)
    return optimizers


def _validation_interval(trainer: Trainer) -> int | float:
    """Batches between validations; infinite for the end of the epoch."""
    interval = trainer.val_check_interval
    length = 1 if trainer.strategy.support.rounds else trainer.num_training_batches  # a round is one to the loop
    if isinstance(interval, int):
        if trainer.check_val_every_n_epoch is not None and interval > length:
            raise ConfigurationError(
                f"val_check_interval={interval} is more than the {length} batches of an epoch: set"
                " check_val_every_n_epoch=None to count over epochs, or a smaller interval."
            )
        return interval
    if interval == 1.0:
        return float("inf")
    if length == float("inf"):
        raise ConfigurationError(
            f"val_check_interval={interval} is a fraction of an epoch without a known length: give a number of batches."
        )
    return max(1, int(length * interval))


def _part_random_streams(trainer: Trainer) -> None:
    """Give replicas different random numbers from here on (dropout); the first keeps the stream it has."""
    replica = trainer.strategy.data.rank
    if replica > 0:
        seed = (torch.initial_seed() + replica) % 2**63
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)


def _sanity_check(trainer: Trainer) -> None:
    """A few validation batches before training, so that a fault in validation shows at once; leaves no trace."""
    steps = trainer.num_sanity_val_steps
    if trainer.validation is None or steps == 0:
        return
    trainer.sanity_checking = trainer.evaluating = True
    trainer.hooks.of_callbacks("on_sanity_check_start")
    try:
        with trainer.random_state_kept():
            trainer.validation.run(limit=None if steps == -1 else steps)
    except Abandoned as stop:
        raise Interrupted(stop.signal) from None
    trainer.hooks.of_callbacks("on_sanity_check_end")
    trainer.sanity_checking = trainer.evaluating = False
    trainer.forget_metrics()


# -- evaluation -------------------------------------------------------------------------------------------------
def _evaluate(trainer: Trainer, request: Request) -> Any:
    stage, strategy = request.stage, trainer.strategy
    found = sources(trainer, request, _LOADER_OF[stage])
    path = snapshot.find(trainer, request.ckpt_path)
    if path is not None:
        trainer.ckpt_path = str(path)
        loaded = snapshot.read(trainer, path)
        with trainer.consensus():
            snapshot.restore_weights(trainer, loaded)
    elif request.ckpt_path is not None:
        raise ConfigurationError(f"ckpt_path={request.ckpt_path!r}: there is no checkpoint to {stage}.")
    if not strategy.trains:
        strategy.serve()
        return None
    trainer.evaluating = True
    if stage == "predict":
        return PredictLoop(trainer, found).run()
    loop = EvaluateLoop(trainer, "validation" if stage == "validate" else stage, found)
    trainer.evaluation = loop
    try:
        results = loop.run()
    except Abandoned as stop:
        raise Interrupted(stop.signal) from None
    trainer.evaluating = False
    return results


@contextmanager
def _deterministic(trainer: Trainer) -> Iterator[None]:
    """The trainer's ``deterministic``, ``benchmark`` and ``detect_anomaly`` for as long as the stage runs."""
    cudnn = torch.backends.cudnn
    former = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.benchmark,
        torch.is_anomaly_enabled(),
    )
    if trainer.deterministic is not None:
        torch.use_deterministic_algorithms(bool(trainer.deterministic), warn_only=trainer.deterministic == "warn")
    if trainer.benchmark is not None:
        cudnn.benchmark = trainer.benchmark
    if trainer.detect_anomaly:
        warnings.warn("detect_anomaly slows training down: use it to find a fault only.", stacklevel=3)
        torch.autograd.set_detect_anomaly(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(former[0], warn_only=former[1])
        cudnn.benchmark = former[2]
        torch.autograd.set_detect_anomaly(former[3])
